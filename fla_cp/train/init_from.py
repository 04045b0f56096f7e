"""--init-from: weights of a published model's folder, read by each rank for its own shard.

weights = InitialFolder(folder, config, vocab_size, ranks)    # checks names, shapes, options
weights.fill(model)                                           # reads the rows of this rank
"""

from __future__ import annotations

import torch

from fla_cp.integrations.layouts import Layout, layout_of
from fla_cp.integrations.layouts.match import check_folder
from fla_cp.integrations.safetensors_folder import TensorFolder, check_copies, check_is_folder
from fla_cp.train.config import ModelConfig, UserError
from fla_cp.train.distributed import Ranks
from fla_cp.train.model import Decoder
from fla_cp.train.progress import announced
from fla_cp.train.tokenizer import needs_extra
from fla_cp.train.waiting_bars import shown
from fla_cp.train.weights import local_tensor, on_meta, owned_rows

FLAG = "--init-from"


def why_not_exported(config: ModelConfig, vocab_size: int) -> str:
    """Why `fla-cp-export` cannot write such a model, with the flag that decides; "" if it can."""
    try:
        _layout(config, vocab_size)
    except ValueError as error:
        return str(error)
    return ""


def _layout(config: ModelConfig, vocab_size: int) -> Layout:
    """The published layout of a decoder. Raises ValueError if there is none, with the reason."""
    with on_meta():
        return layout_of(Decoder(config, vocab_size))


class InitialFolder:
    """A folder that fits a decoder.

    path: of a folder like those of `fla-cp-export`. config, vocab_size: of the decoder. notes: what
    differs on purpose.
    Raises UserError, on all ranks, for a folder that does not fit; see `check_folder`. Collective.
    """

    def __init__(self, path: str, config: ModelConfig, vocab_size: int, ranks: Ranks) -> None:
        self.path, self.ranks = path, ranks
        self.notes: list[str] = []
        problem = ""
        try:
            needs_extra(FLAG, "safetensors", "transformers")
            check_is_folder(path)
            self.layout = _layout(config, vocab_size)
            self.folder = TensorFolder(path, self.layout.renamed)
            self.notes = check_folder(self.layout, self.folder)
        except (ValueError, OSError) as error:
            problem = str(error)
        self._agree(problem)

    @announced("initial weights")
    def fill(self, model: Decoder) -> None:
        """Fills this rank's shard. A rank holds one parameter's rows of the folder at a time, and
        reads no others. Raises UserError, on all ranks, for files that cannot be read. Collective.
        """
        problem = ""
        try:
            read_into(model, self.layout, self.folder, "say --model.tie-embeddings False")
        except (ValueError, OSError) as error:
            problem = str(error)
        finally:
            self.folder.close()
        self._agree(problem)

    def _agree(self, problem: str) -> None:
        problem = self.ranks.first_problem(problem)
        if problem:
            raise UserError(f"{FLAG}: {problem}")


@torch.no_grad()
def read_into(model: Decoder, layout: Layout, folder: TensorFolder, advice: str) -> None:
    """Reads this rank's rows of each parameter and buffer, one tensor after the other.

    Raises ValueError, on ranks that read such rows, for a head that differs from the embedding that
    it is tied to. advice: what to do about it.
    """
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    with shown("loading weights", len(layout.own), "tensors") as update:
        for name in layout.own:
            whole = tensors[name]
            rows = owned_rows(whole)
            local_tensor(whole).copy_(layout.read_rows(folder, name, rows.start, rows.stop))
            update()
    check_copies(folder, layout.copies, advice, owned_rows(model.embedding.weight))
