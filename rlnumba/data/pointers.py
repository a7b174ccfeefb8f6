"""Files of Git LFS whose content was not fetched with a repository."""

LFS_POINTER = b"version https://git-lfs"


def unfetched(path):
    """The message of a file that is a pointer of Git LFS, in place of its content: str; None of any other file."""
    try:
        with open(path, "rb") as file:
            is_pointer = file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return None
    return f"{path}: a pointer of Git LFS, not the file itself: fetch it with git lfs pull" if is_pointer else None
