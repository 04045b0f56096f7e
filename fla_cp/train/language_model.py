"""What the trainer asks of a model: our own decoder, or one of transformers."""

from __future__ import annotations

from torch import nn

from fla_cp.train.balance import Balance


class LanguageModel(nn.Module):
    """A causal language model over the tokens that a rank owns.

    A call takes (tokens, context, labels): tokens and labels [1, T_local] int64, of which a label
    of -100 is not counted. It returns the summed cross-entropy of this rank's targets, or logits
    [1, T_local, vocabulary] without labels.

    balance: counts the loads of experts, if the model has any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.balance: Balance | None = None

    def block_list(self) -> list[nn.Module]:
        """The blocks, each of which is sharded and gathered by itself."""
        return list(self.get_submodule("blocks").children())

    def exact_parts(self) -> list[nn.Module]:
        """The parts whose parameters are not cast to a narrower compute dtype."""
        return []

    def tie_weights(self) -> None:
        """Makes the head share the embedding's weight if the model is tied. To be called once more
        after `to_empty`, which allocates two separate weights."""

    def move_biases(self) -> None:
        """Moves the routers' biases by the loads of the step, if the trainer does that."""


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a LanguageModel, or of any model that has them as `blocks`."""
    if isinstance(model, LanguageModel):
        return model.block_list()
    return list(model.get_submodule("blocks").children())
