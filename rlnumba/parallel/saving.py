"""Checkpoints of several ranks, each of which writes what it has: its part of the optimizer's state and of the weights.

    rank 0         creates the folder and its files, of whole size, without values           -> CREATED
    each rank      writes its values in place, flushes them                                  -> written_by(rank)
    rank 0         waits for all, hashes and flushes the files, renames the folder

Files have the bits that one rank's have: where a tensor begins follows from a file's header, not from who writes it.
Ranks copy their parts to the host, go on training, and write in a thread. That thread does not use the Communicator:
how far a rank is follows from small files in the folder that is written. So output_dir is a folder that all ranks see,
which is tried when a run begins.
A rank that is killed leaves a folder without its name, which the next start removes.
"""

import os
import secrets
import shutil
import time

from rlnumba import checkpoint
from rlnumba.errors import ConfigError, UserError
from rlnumba.model.tensor_file import create_tensors, open_tensors, open_to_write
from rlnumba.model.transformer import host_copy, save_model
from rlnumba.model.weights import create_weights, files_of, remove_others
from rlnumba.parallel.layer_shards import LayerShards
from rlnumba.parallel.zero import Part

CREATED = ".created"
# Seconds between looks at the folder.
POLL_S = 0.02
# Seconds in which other hosts see what one has written: NFS keeps attributes of folders for up to 60 s by default.
VISIBLE_S = 90.0


def written_by(rank):
    """The name of the file that a rank writes when its values are on the disk: empty, or what went wrong."""
    return f".written-{rank}"


class SharedSaver(checkpoint.Saver):
    """A Saver of several ranks, each of which has one, and calls its methods at the same time.

    CheckpointErrors are rank 0's, also those of other ranks' parts. Raises ConfigError on all ranks unless output_dir
    is one folder.
    """

    def __init__(self, output_dir, communicator):
        super().__init__(output_dir)
        self.communicator = communicator
        check_is_one_folder(self.output_dir, communicator)

    def save(self, step, model, tokenizer, trainer_state, keep_last=None, keep=None):
        """The same as Saver.save, but only the ArrayParts of trainer_state are used on other ranks than the first."""
        self.wait()
        rank, world_size, arrays = self.communicator.rank, self.communicator.world_size, {}
        part = Part.of(model.weights.size, rank, world_size)
        # An adapter is small, and rank 0 has its exact values.
        parts = []
        if model.adapter is None or rank == 0:
            model = host_copy(model, slice(part.start, part.stop))
        if model.adapter is None:
            parts += model.weights.parts()
        state = checkpoint.separate(trainer_state, "", arrays)
        if trainer_state is not None:
            parts += own_parts(arrays, rank == 0)
        if rank:
            self._start(lambda: self._write_part(checkpoint.partial_of(self.output_dir, step), parts))
            return

        def write():
            with checkpoint.new_folder(self.output_dir, step, keep_last, keep) as partial:
                create(partial, model, tokenizer, None if trainer_state is None else arrays)
                try:
                    fill(partial, parts, self.communicator)
                finally:
                    # The others may be writing even if this rank has failed.
                    problems = self._wait_for_others(partial)
                if problems:
                    raise UserError(problems[0])
                checkpoint.complete(partial, step, state)

        self._start(write)

    def _write_part(self, partial, parts):
        """Write the part of another rank than the first; its errors become rank 0's."""
        problem = ""
        try:
            self._wait_for(partial / CREATED, 0)
            fill(partial, parts, self.communicator)
        except (OSError, UserError) as error:
            problem = f"rank {self.communicator.rank}: {getattr(error, 'strerror', None) or error}"
        if partial.exists():
            mark(partial / written_by(self.communicator.rank), problem)

    def _wait_for_others(self, partial):
        """[What went wrong on another rank], when all have written; removes the files that say so."""
        marks, problems = [partial / written_by(rank) for rank in range(1, self.communicator.world_size)], []
        for rank, path in enumerate(marks, 1):
            try:
                self._wait_for(path, rank)
                if problem := path.read_text():
                    problems.append(problem)
            except UserError as error:
                problems.append(str(error))
        for path in (partial / CREATED, *marks):
            path.unlink(missing_ok=True)
        return problems

    def _wait_for(self, path, rank):
        """Return when a rank has written a file. Raises UserError after the time that operations have."""
        deadline = time.monotonic() + self.communicator.timeout_s
        while not path.exists():
            if time.monotonic() > deadline:
                raise UserError(f"rank {rank} did not write its part within {self.communicator.timeout_s:g} s")
            time.sleep(POLL_S)


def check_is_one_folder(path, communicator):
    """Raise ConfigError, the same on all ranks, unless the folder that each of them has at `path` is one and the same.

    All ranks call this.
    """
    mine = path / f".seen-by-all-ranks-{secrets.token_hex(8)}" if communicator.rank == 0 else None
    if mine is not None:
        path.mkdir(parents=True, exist_ok=True)
        mine.touch()
    try:
        name = communicator.objects(mine and mine.name)[0]
        deadline = time.monotonic() + VISIBLE_S
        while not (sees := (path / name).exists()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        blind = [rank for rank, each in enumerate(communicator.objects(sees)) if not each]
    finally:
        if mine is not None:
            mine.unlink()
    if blind:
        raise ConfigError(
            f"output_dir {path} is not one folder: rank {blind[0]} does not see there what rank 0 writes; ranks on "
            "several hosts need a folder that all hosts have mounted at this path"
        )


def own_parts(arrays, is_first):
    """[(name, number of the first element, values)] of what this rank writes of {name: ArrayPart or whole array}."""
    found = []
    for name, array in arrays.items():
        if isinstance(array, checkpoint.ArrayPart):
            found.append((name, array.start, array.values))
        elif is_first:
            found.append((name, 0, array))
    return found


def create(partial, model, tokenizer, arrays):
    """Create the files of a checkpoint, with all values that do not come from parts.

    arrays: {name: ArrayPart or array} of the state, or None for the model alone.
    """
    save_model(model, partial, tokenizer, write_weights=create_weights)
    for name, tensors in {} if arrays is None else checkpoint.by_file(arrays).items():
        create_tensors(partial / name, {path: (array.shape, array.dtype) for path, array in tensors.items()})
    mark(partial / CREATED, "")


def fill(partial, parts, communicator):
    """Write [(name, number of the first element, values)] into the files that have tensors of these names."""
    files = {path: open_tensors(path) for path in sorted(partial.glob("*.safetensors"))}
    by_file = {path: [part for part in parts if part[0] in tensors] for path, tensors in files.items()}
    if sum(map(len, by_file.values())) != len(parts):
        raise ValueError(f"{partial}: the files have not all tensors of which rank {communicator.rank} has a part")
    for number, (path, tensors) in enumerate(files.items()):
        with open_to_write(path) as descriptor:
            for name, first, values in by_file[path]:
                tensors[name].write(descriptor, values, first)
        if number == 0:
            communicator.saving()


def has_parts(model):
    """Whether what is saved of a model is in parts, of which each rank has one."""
    return model.adapter is None and isinstance(model.weights, LayerShards)


def save_parts(model, folder, tokenizer, heads, communicator):
    """Write what save_model does, of a model that has_parts.

    All ranks call this, and each writes the values of its part; files that a folder has are replaced when all are
    complete. Raises UserError and OSError.
    """
    partial, files = folder.parent / f".{folder.name}.partial", files_of(model.weights, heads=heads)
    if communicator.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        save_model(model, partial, tokenizer, heads=heads, write_weights=create_weights)
    communicator.barrier()
    names = set().union(*files.values())
    fill(partial, [part for part in model.weights.parts() if part[0] in names], communicator)
    communicator.barrier()
    if communicator.rank == 0:
        for path in sorted(path for path in partial.rglob("*") if path.is_file()):
            new = folder / path.relative_to(partial)
            new.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, new)
        remove_others(folder, files)
        shutil.rmtree(partial)


def mark(path, text):
    """Write a small file that is complete when it has its name."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    os.rename(partial, path)
