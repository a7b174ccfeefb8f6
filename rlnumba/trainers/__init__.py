"""The trainers: a module each, with its batches, its loss and its record; `every.py` lists them."""
