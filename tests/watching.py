"""Watching a trainer's model: what its layers received, and how far each sequence is from the same sequence alone."""

import torch
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_pre_hook


def known(hook):
    """As a library's own: a stranger's hook sends an adapted model the padded way."""
    hook.__module__ = "transformers"
    return hook


class Watch:
    """Hooks on a model, transformers' or shaped like one, from `with Watch(model) as seen`: the hidden states of each
    forward that trains, and the gradient of the first step."""

    def __init__(self, model):
        self.model, self.base = model, getattr(model, "base_model", None) or model.model
        self.rows, self.masks, self.learned, self.gradient = [], {}, [], []

    def __enter__(self):
        self.handles = [self.base.register_forward_hook(known(lambda *told: self._saw(*told)), with_kwargs=True)]
        for module, note in {self.base: self._came, self.model: self._labelled}.items():
            hook = known(lambda *told, note=note: note(*told))
            self.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
        self.handles.append(register_optimizer_step_pre_hook(self._stepped))
        for name, module in self.base.named_modules():
            if name.endswith(("linear_attn", "self_attn")):
                self.handles.append(module.register_forward_pre_hook(known(self._layer(name)), with_kwargs=True))
        return self

    def __exit__(self, *error):
        for handle in self.handles:
            handle.remove()

    def _came(self, module, args, kwargs):
        self.ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]

    def _labelled(self, module, args, kwargs):
        if kwargs.get("labels") is not None and not self.gradient:
            self.learned += zip(kwargs["input_ids"].tolist(), kwargs["labels"].tolist())

    def _stepped(self, *told):
        self.trained = [p for p in self.model.parameters() if p.grad is not None]
        self.gradient = self.gradient or [p.grad.clone() for p in self.trained]

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

    def gradient_error(self, sequences):
        """The relative error of the first step's gradient, of the mean over labels; None if none came by."""
        each = ((row, labels, list(ids)) for row, labels in self.learned for ids in sequences)
        places = ((row, labels, ids, at) for row, labels, ids in each for at in range(len(row)))
        found = [(ids, labels[at + 1 : at + len(ids)]) for row, labels, ids, at in places if row[at : at + len(ids)] == ids]
        self.model.zero_grad()
        for ids, labels in found:
            one = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}
            logits = self.model(**one, use_cache=False).logits[0, :-1]
            cross_entropy(logits, torch.tensor(labels), reduction="sum").backward()
        count = sum(label >= 0 for _, labels in found for label in labels)
        off = [(x * count - p.grad).norm() for x, p in zip(self.gradient, self.trained)] if found else []
        return float(torch.stack(off).norm() / torch.stack([p.grad.norm() for p in self.trained]).norm()) if off else None


def _hidden(output):
    return getattr(output, "last_hidden_state", output)
