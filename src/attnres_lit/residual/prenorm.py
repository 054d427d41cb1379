"""PreNorm: the plain residual stream, the baseline of every comparison.

h_0 = embedding        h_{s+1} = h_s + f_s(h_s)
"""

from torch import Tensor

from attnres_lit.residual.base import Note, Residual, Sources


class PreNorm(Residual):
    """The sum of the embedding and all sublayer outputs so far. No parameters."""

    starts_as_prenorm = True

    def open(self, embedding: Tensor) -> Sources:
        """The stream starts as the embedding."""
        return Sources((), embedding)

    def read(self, sources: Sources, site: int) -> tuple[Tensor, Note]:
        """The stream itself."""
        return sources.stream, ()

    def write(self, sources: Sources, output: Tensor, site: int, note: Note) -> Sources:
        """Add the output to the stream."""
        return Sources((), sources.stream + output)

    def exit(self, sources: Sources) -> Tensor:
        """The stream itself."""
        return sources.stream
