"""DenseFormer: a learned average over the outputs of all earlier layers (arXiv 2402.02622).

    X_0 = embedding, X_i = layer_i(Y_{i-1})
    Y_i = sum_j alpha_{i,j} X_j over j <= i, j = i mod dilation        after every `period`-th layer, else Y_i = X_i

A layer output X_i already contains the PreNorm sums inside the layer; the average comes after the layer's MLP.
"""

import torch
from torch import Tensor, nn

from attnres_lit.ops import weighted_sum
from attnres_lit.residual.base import Note, Residual, Sources


class DenseFormer(Residual):
    """Depth-weighted averages after whole layers. Equal to PreNorm, exactly, at the start.

    Args:
        num_sites: sublayers of the whole model, two a layer.
        dim: model width D.
        dilation: average over every `dilation`-th layer output.
        period: average after every `period`-th layer.

    Raises:
        ValueError: a dilation or period that is below 1 or larger than the number of layers (it would leave a pure
            scale, or no parameters); an odd number of sites.
    """

    starts_as_prenorm = True

    def __init__(self, num_sites: int, dim: int, dilation: int = 1, period: int = 1) -> None:
        super().__init__(num_sites, dim)
        if num_sites % 2:
            raise ValueError(f"DenseFormer averages after whole layers: num_sites={num_sites} must be even")
        num_layers = num_sites // 2
        for name, value in (("dilation", dilation), ("period", period)):
            if not 1 <= value <= num_layers:
                raise ValueError(f"{name}={value} must be between 1 and the number of layers, {num_layers}")
        self.dilation, self.period = dilation, period
        mixed = range(period, num_layers + 1, period)
        # layer i of the table below averages over these layer outputs, oldest first
        self._reads = {i: range(i % dilation, i + 1, dilation) for i in mixed}
        self._alive = [
            tuple(j for j in range(i + 1) if any(j in self._reads[later] for later in mixed if later > i))
            for i in range(num_layers + 1)
        ]
        # keyed by the site that ends the layer
        self.alpha = nn.ParameterDict({str(2 * i - 1): torch.empty(len(self._reads[i])) for i in mixed})
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The newest output has weight one, all others zero."""
        for alpha in self.alpha.values():
            nn.init.zeros_(alpha)
            nn.init.ones_(alpha[-1:])

    def open(self, embedding: Tensor) -> Sources:
        """The embedding is both the stream and the first source."""
        return Sources((embedding,) if self._alive[0] else (), embedding)

    def read(self, sources: Sources, site: int) -> tuple[Tensor, Note]:
        """The stream itself."""
        return sources.stream, ()

    def write(self, sources: Sources, output: Tensor, site: int, note: Note) -> Sources:
        """Add the output to the stream; after a layer, average, and keep only what a later layer still reads."""
        stream = sources.stream + output
        layer, within = divmod(site + 1, 2)
        if within:
            return Sources(sources.done, stream)
        outputs = dict(zip(self._alive[layer - 1], sources.done, strict=True)) | {layer: stream}
        done = tuple(outputs[j] for j in self._alive[layer])
        if layer in self._reads:
            stream = weighted_sum([outputs[j] for j in self._reads[layer]], self.alpha[str(site)])
        return Sources(done, stream)

    def exit(self, sources: Sources) -> Tensor:
        """The stream itself."""
        return sources.stream
