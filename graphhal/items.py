"""What the engine knows of one item of a request: rows in, tokens out, attention sequences."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from graphhal.errors import AdapterError


@dataclass(frozen=True, slots=True)
class ItemSpec:
    """One image, video or clip, or a run of whole frames of one video.

    Attributes:
        index: position of the item in its request.
        modality: `"image"`, `"video"`, `"audio"`, …, as the host calls it.
        rows: input rows that the item takes in a graph's input (patches, or audio windows).
        tokens: output rows that the encoder makes for it.
        sequences: per boundary set, the lengths of its attention sequences in order; the set is
            named like the `cu_seqlens` buffer that carries it.
        signature: hashable; items of equal signature, frames, rows and tokens have equal host
            metadata and attention sequences.
        row_offset: first row of this item in the request's concatenated input.
        token_offset: first of the item's own output tokens that this spec covers (frame chunks).
        frames: equal parts, one after another, whose attention sequences are independent.
        splittable: runs of whole frames may be replayed apart (a video), and are still equal.
    """

    index: int
    modality: str
    rows: int
    tokens: int
    sequences: Mapping[str, tuple[int, ...]]
    signature: Hashable
    row_offset: int = 0
    token_offset: int = 0
    frames: int = 1
    splittable: bool = False

    def chunk(self, first: int, frames: int) -> "ItemSpec":
        """The spec of `frames` frames from frame `first` on; frames are equal and independent.

        Raises:
            AdapterError: such frames do not exist, or the item's frames are not equal parts.
        """
        if not 0 <= first < first + frames <= self.frames:
            raise AdapterError(
                f"item {self.index}: frames {first} to {first + frames} of {self.frames} do not "
                "exist"
            )
        parts = (self.rows, self.tokens, *map(len, self.sequences.values()))
        if any(part % self.frames for part in parts):
            raise AdapterError(
                f"item {self.index}: {self.rows} rows, {self.tokens} tokens and its sequences are "
                f"not {self.frames} equal frames"
            )
        rows, tokens = self.rows // self.frames, self.tokens // self.frames
        return replace(
            self,
            rows=rows * frames,
            tokens=tokens * frames,
            sequences={
                name: lengths[
                    first * len(lengths) // self.frames : (first + frames)
                    * len(lengths)
                    // self.frames
                ]
                for name, lengths in self.sequences.items()
            },
            row_offset=self.row_offset + first * rows,
            token_offset=self.token_offset + first * tokens,
            frames=frames,
        )
