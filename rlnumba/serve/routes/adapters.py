"""/v1/load_lora_adapter, /v1/unload_lora_adapter: adapters that come and go while the server runs.

A folder is read and checked beside the steps of the engine; between two of them its values are copied. An adapter that
is unloaded, or replaced, serves the requests that have begun with it until they end.
"""

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import click
from starlette.responses import PlainTextResponse

from rlnumba.engine.adapters import read_for
from rlnumba.errors import UserError, shown
from rlnumba.model.lora import CONFIG, TENSORS
from rlnumba.serve.protocol.errors import ApiError

LONGEST_NAME = 256


@dataclass(frozen=True)
class ServedAdapter:
    """An adapter as /v1/models shows it. folder: as the request named it."""

    name: str
    folder: str


class ServedAdapters:
    """The adapters that a `model` may name, in the server's thread; the engine's thread has the NamedAdapters.

    given: ServedAdapters that are loaded when the server starts.
    """

    def __init__(self, settings, engine_loop, off_loop, given=()):
        self.settings, self.engine_loop, self.off_loop = settings, engine_loop, off_loop
        self.by_name = {each.name: each for each in given}
        # One at a time.
        self.lock = asyncio.Lock()

    async def load(self, name, path, in_place):
        """Have an adapter of the folder at `path`, in place of one of this name. Raises ApiError."""
        async with self.lock:
            if name in self.settings.names:
                raise ApiError(f"The lora adapter name '{name}' conflicts with a served base model.", "lora_name")
            if name in self.by_name and not in_place:
                raise ApiError(
                    f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
                    "'load_inplace' to True.",
                    "lora_name",
                )
            try:
                folder = await self.off_loop(folder_within, self.settings.lora_root, path)
                read = await self.off_loop(read_for, self.engine_loop.engine.model, folder)
                loading = self.engine_loop.call(self.engine_loop.load_adapter, name, folder, read, in_place)
                await asyncio.wrap_future(loading)
            except UserError as error:
                raise ApiError(f"The lora adapter '{name}' cannot be loaded: {error}", "lora_path") from None
            self.by_name[name] = ServedAdapter(name, path)
            click.echo(f"serve: adapter {shown(name)} is that of {folder}", err=True)

    async def unload(self, name):
        """Let no more requests begin with an adapter. Raises ApiError."""
        async with self.lock:
            if self.by_name.pop(name, None) is None:
                raise ApiError(f"The lora adapter '{name}' cannot be found.", "lora_name", status=404)
            await asyncio.wrap_future(self.engine_loop.call(self.engine_loop.adapters.unload, name))
            click.echo(f"serve: adapter {shown(name)} is unloaded", err=True)


def folder_within(root, path):
    """The adapter folder that a path means, absolute or below the root. Raises ApiError where it, or one of its files,
    lies outside of the root, through links too, and where it is not there."""
    root = os.path.realpath(root)
    try:
        folder = os.path.realpath(os.path.join(root, path))
        files = [os.path.realpath(os.path.join(folder, name)) for name in (CONFIG, TENSORS)]
    except (ValueError, OSError):
        raise ApiError(f"lora_path must be the path of a folder, got {shown(path)}", "lora_path") from None
    if any(os.path.commonpath([root, each]) != root for each in (folder, *files)):
        raise ApiError(f"lora_path {shown(path)} is not below the server's --lora-root", "lora_path")
    if not os.path.isdir(folder):
        raise ApiError(f"No adapter found for {shown(path)}", "lora_path", status=404)
    if not all(map(os.path.isfile, files)):
        raise ApiError(f"lora_path {shown(path)} must have the files {CONFIG} and {TENSORS}", "lora_path")
    return Path(folder)


def _name_of(body, message):
    """The lora_name of a body; message: of the error without one."""
    name = body.string("lora_name")
    if not name:
        raise ApiError(message, "lora_name")
    if len(name) > LONGEST_NAME or not name.isprintable():
        body.refuse("lora_name", f"at most {LONGEST_NAME} characters that can be printed")
    return name


async def load(service, body, request):
    """Load an adapter from a folder below the server's root."""
    message = "Both 'lora_name' and 'lora_path' must be provided."
    name, path = _name_of(body, message), body.string("lora_path")
    if not path:
        raise ApiError(message, "lora_path")
    if body.boolean("is_3d_lora_weight"):
        body.refuse("is_3d_lora_weight", "false")
    await service.adapters.load(name, path, body.boolean("load_inplace"))
    body.log_unread()
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload(service, body, request):
    """Unload an adapter; requests that have begun with it go on."""
    name = _name_of(body, "'lora_name' needs to be provided to unload a LoRA adapter.")
    body.get("lora_int_id")
    await service.adapters.unload(name)
    body.log_unread()
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")
