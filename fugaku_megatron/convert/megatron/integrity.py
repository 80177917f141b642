"""Manifests of torch_dist checkpoints that Megatron-LM saved with --verify-integrity: a digest of each file.

DIR/integrity.json                {"algorithm": "sha256", "files": {name: digest}}

Source: megatron/core/dist_checkpointing/validation.py of megatron-core 0.19.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ...config.fields import check
from ..hugging_face.tensor_directory import read_json

INTEGRITY = "integrity.json"
ALGORITHM = "sha256"
_PIECES = ".distcp"


@dataclass(frozen=True)
class IntegrityManifest:
    """Digests of an iteration's files, none without a manifest.

    digests: hexadecimal, by file name
    """

    path: Path
    digests: dict[str, str]
    _verified: set[str] = field(default_factory=set)

    @staticmethod
    def open(path: Path) -> IntegrityManifest:
        """Read a manifest and verify the files that have no pieces. Raise ValueError for a file that is missing or differs."""
        file = path / INTEGRITY
        if not file.exists():
            return IntegrityManifest(path, {})
        contents = read_json(file)
        algorithm = contents.get("algorithm", ALGORITHM)
        check(
            algorithm == ALGORITHM,
            f"{file} has digests of {algorithm!r:.40}, and {ALGORITHM} is read: remove the file to load without them",
        )
        digests = contents.get("files")
        sound = isinstance(digests, dict) and all(
            isinstance(digest, str) for digest in digests.values()
        )
        check(sound, f"{file} is damaged: files is not an object of names and digests")
        manifest = IntegrityManifest(path, digests or {})
        for name in manifest.digests:
            check((path / name).is_file(), f"{path / name} is missing, and {INTEGRITY} lists it")
            if not name.endswith(_PIECES):
                manifest.verify(name)
        return manifest

    def verify(self, name: str) -> None:
        """Raise ValueError if a file has another digest. A file is read once."""
        if name not in self.digests or name in self._verified:
            return
        with open(self.path / name, "rb") as stream:
            found = hashlib.file_digest(stream, ALGORITHM).hexdigest()
        check(
            found == self.digests[name],
            f"{self.path / name} is not the file that was saved: its {ALGORITHM} is {found[:16]}..., and {INTEGRITY} has "
            f"{self.digests[name][:16]}...: copy the checkpoint again, or load another iteration",
        )
        self._verified.add(name)

    def verify_all(self) -> None:
        """Verify every file, several at a time."""
        with ThreadPoolExecutor() as threads:
            list(threads.map(self.verify, self.digests))
