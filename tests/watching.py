"""Watching a trainer's model: what its layers received, and how far each sequence is from the same sequence alone."""

import torch


def known(hook):
    """As a library's own: a stranger's hook sends an adapted model the padded way."""
    hook.__module__ = "transformers"
    return hook


class Watch:
    """Hooks on a model, transformers' or shaped like one, from `with Watch(model) as seen`: the hidden states of each
    forward that trains."""

    def __init__(self, model):
        self.base = getattr(model, "base_model", None) or model.model
        self.rows, self.masks = [], {}

    def __enter__(self):
        self.handles = [self.base.register_forward_hook(known(lambda *told: self._saw(*told)), with_kwargs=True)]
        came = known(lambda *told: self._came(*told))
        self.handles += [self.base.register_forward_pre_hook(came, with_kwargs=True, prepend=True)]
        for name, module in self.base.named_modules():
            if name.endswith(("linear_attn", "self_attn")):
                self.handles.append(module.register_forward_pre_hook(known(self._layer(name)), with_kwargs=True))
        return self

    def __exit__(self, *error):
        for handle in self.handles:
            handle.remove()

    def _came(self, module, args, kwargs):
        module._forward_hooks.move_to_end(self.handles[0].id)  # behind those of `adapt`, which give rows back
        self.ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]

    def _saw(self, module, args, kwargs, output):
        if not kwargs.get("use_cache"):
            self.rows += zip(self.ids.tolist(), _hidden(output).detach().clone())

    def _layer(self, name):
        def note(module, args, kwargs):
            mask = kwargs.get("attention_mask")
            form = "None" if mask is None else f"{str(mask.dtype)[6:]} {list(mask.shape)}"
            told = [key for key in ("cu_seq_lens_q", "seq_idx") if kwargs.get(key) is not None]
            self.masks.setdefault(name.rpartition(".")[2], set()).add(" + ".join([form, *told]))

        return note

    @torch.no_grad()
    def error(self, sequences):
        """The largest difference of a hidden state to the sequence alone, over its size; and how many were compared."""
        worst, found = 0.0, 0
        for ids in map(list, sequences):
            alone = None
            for row, hidden in self.rows:
                for at in (at for at in range(len(row) - len(ids) + 1) if row[at : at + len(ids)] == ids):
                    if alone is None:
                        one = torch.tensor([ids])
                        alone = _hidden(self.base(input_ids=one, attention_mask=torch.ones_like(one), use_cache=False))[0]
                    gap = (hidden[at : at + len(ids)] - alone).abs().max() / alone.abs().max()
                    worst, found = max(worst, float(gap.nan_to_num(nan=torch.inf))), found + 1
        return worst, found


def _hidden(output):
    return getattr(output, "last_hidden_state", output)
