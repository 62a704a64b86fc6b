"""The policy as the trainer holds it: any causal language model of transformers, over packed rows, sharded by FSDP2.

Owns loading, the check that packing is exact for this architecture, sharding, per-token logprobs, and the way out: the
weights under the names that ``save_pretrained`` writes, gathered bucket by bucket.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX, checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from asyncrl.core.manifest import Manifest, TensorInfo
from asyncrl.train import attention, lora
from asyncrl.train.attention import Kernel, Layout
from asyncrl.train.head import chosen_logprobs
from asyncrl.train.sequence import Split


class ModelError(Exception):
    """The model folder cannot be trained. One line with the remedy."""


class Trunk(nn.Module):
    """A language model as a map from packed tokens to hidden states, and from these to values if it has a head for it:
    what policy and critic have in common. ``kernel`` and ``split`` are set by ``attend``."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm
        self.value_head: nn.Linear | None = None
        self.kernel: Kernel = attention.blocks
        self.split: Split | None = None

    @property
    def vocabulary(self) -> int:
        return int(self.lm.config.get_text_config().vocab_size)

    @property
    def counts(self) -> bool:
        """False on ranks whose rows are also another's, which counts them."""
        return self.split is None or self.split.rank == 0

    @property
    def sharing(self) -> int:
        """How many ranks work on each row."""
        return 1 if self.split is None else self.split.size

    def add_value_head(self) -> None:
        """Before sharding. It begins with values of 0, on every rank."""
        self.value_head = nn.Linear(self.lm.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def hidden(self, tokens: Tensor, layout: Layout, positions: Tensor) -> Tensor:
        """The last hidden states ``[n, hidden size]`` at ``positions`` ``[n]`` of ``tokens`` ``[row length]``; with
        ``split`` of those positions that are this rank's."""
        places = layout.positions
        if self.split is not None:
            positions = positions[self.split.mine(positions, len(tokens))] - self.split.span(len(tokens))[0]
            tokens, places = self.split.own(tokens), self.split.own(places)
        states: Tensor = self.lm.base_model(
            input_ids=tokens[None],
            position_ids=places,
            use_cache=False,
            layout=layout,
            kernel=self.kernel,
            split=self.split,
        ).last_hidden_state[0][positions]
        return states

    def values(self, hidden: Tensor) -> Tensor | None:
        """``[n]``, computed in float32."""
        # Not [:, 0]: FSDP warns of outputs that are views.
        return None if self.value_head is None else self.value_head(hidden.float()).sum(-1)


class Critic(Trunk):
    """A model of its own, whose vocabulary head is left out, seen as a map from packed tokens to values."""

    def __init__(self, lm: PreTrainedModel) -> None:
        super().__init__(cast(PreTrainedModel, lm.base_model))
        self.add_value_head()

    def forward(self, tokens: Tensor, layout: Layout, positions: Tensor) -> Tensor:
        """What is still to come after each of ``positions`` ``[n]``: float32 ``[n]``."""
        values = self.values(self.hidden(tokens, layout, positions))
        assert values is not None
        return values if self.split is None else self.split.whole(values, self.split.mine(positions, len(tokens)))


class Scores(NamedTuple):
    """What a policy says of chosen next tokens, each ``[n]`` float32: their log-probability and the entropy of the
    distribution there, both at the sampling temperature; and with a value head the value of the state before."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None


class Policy(Trunk):
    """A causal language model seen as a map from packed tokens to the logprobs of chosen next tokens.

    ``entropy_gradient``: the entropy is to be differentiated too, for a bonus on it. ``lora_scale``: α/r of adapters.
    """

    def __init__(self, lm: PreTrainedModel, temperature: float) -> None:
        super().__init__(lm)
        self.temperature = temperature
        self.entropy_gradient = False
        self.lora_scale = 0.0

    def forward(self, tokens: Tensor, layout: Layout, positions: Tensor, targets: Tensor) -> Scores:
        """Of each of ``targets`` ``[n]`` after the row position of the same rank in ``positions`` ``[n]``.

        ``tokens`` is ``[row length]``. Only the chosen positions meet the vocabulary. With ``split`` a collective of
        the ranks that share the row; all of them get everything.
        """
        hidden = self.hidden(tokens, layout, positions)
        mine = None if self.split is None else self.split.mine(positions, len(tokens))
        logprobs, entropy = chosen_logprobs(
            self.lm.get_output_embeddings(),
            hidden,
            targets if mine is None else targets[mine],
            temperature=self.temperature,
            soft_cap=getattr(self.lm.config.get_text_config(), "final_logit_softcapping", None),
            entropy_gradient=self.entropy_gradient,
        )
        values = self.values(hidden)
        if self.split is not None and mine is not None:
            logprobs, entropy = self.split.whole(logprobs, mine), self.split.whole(entropy, mine)
            values = None if values is None else self.split.whole(values, mine)
        return Scores(logprobs, entropy, values)


def load(path: str, temperature: float, key: str = "model.path", headless: bool = False) -> Policy:
    """The Hugging Face folder ``path`` in float32, without dropout; ``headless`` if it may lack the vocabulary head.
    Raises ``ModelError``, which names ``key``."""
    if not (Path(path) / "config.json").is_file():
        raise ModelError(f"{key}: {path} is not a Hugging Face model folder (no config.json)")
    transformers_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager", local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(f"{key}: cannot load {path}: {str(error).strip().splitlines()[0]}") from error
    lm, info = cast(tuple[PreTrainedModel, dict[str, set[str]]], loaded)
    # transformers draws at random what a folder lacks.
    heads = [f"{name}." for name, part in lm.named_modules() if headless and part is lm.get_output_embeddings()]
    if missing := sorted(name for name in info["missing_keys"] if not name.startswith(tuple(heads))):
        raise ModelError(f"{key}: {path} has no {missing[0]} ({len(missing)} tensors are missing)")
    # Always in evaluation mode: the logprobs have to be those of the policy that the engines serve.
    lm.eval()
    policy = Policy(lm, temperature)
    check_packing(policy)
    return policy


@torch.no_grad()
def check_packing(policy: Policy) -> None:
    """Compare a packed row with the model's own forward on each sequence, and keep the packed attention.

    Proves for the architecture at hand what packing takes for granted: that nothing passes from one sequence to the
    next, that positions may restart, that the attention has no term of its own, and that logits are the head applied to
    the last hidden state. What only longer sequences would show, the configuration says: a rope that depends on the
    row's length, and windows that do not reach the packed attention. Raises ``ModelError``.
    """
    lm = policy.lm
    if rope := _rope_by_row(lm):
        raise ModelError(
            f"model.path: {type(lm).__name__} with rope_type {rope} turns all positions of a row by its longest "
            "sequence; it cannot be trained without padding"
        )
    windows: list[int | None] = []

    def watched(*given: Any) -> Tensor:
        windows.append(given[5])
        return attention.blocks(*given)

    rows = _probe(policy)
    expected = [
        (lm(input_ids=row[None], use_cache=False).logits[0, :-1].float() / policy.temperature)
        .log_softmax(-1)
        .gather(-1, row[1:, None])[:, 0]
        for row in rows
    ]
    try:
        lm.set_attn_implementation(attention.NAME)
        policy.kernel = watched
        got = _packed(policy, rows, torch.device("cpu"))
        difference = float((got - torch.cat(expected)).abs().max())
    except (TypeError, ValueError) as error:
        raise ModelError(f"model.path: {type(lm).__name__} cannot take packed sequences: {error}") from error
    if not difference < 1e-3:
        raise ModelError(
            f"model.path: {type(lm).__name__} gives other logprobs for packed sequences (off by {difference:.3g}); "
            "this architecture cannot be trained without padding"
        )
    policy.kernel = attention.blocks
    # Of no layer where a model keeps to transformers' own attention, whose mask has both windows and sequences.
    if windows and _windowed_layers(lm) > sum(window is not None for window in windows):
        raise ModelError(
            f"model.path: {type(lm).__name__} has attention windows in its mask only; it cannot be trained without "
            "padding"
        )


def _rope_by_row(lm: PreTrainedModel) -> str:
    """The rope_type whose frequencies depend on a row's largest position, or nothing."""
    config = lm.config.get_text_config()
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):  # some models have one for each type of layer
        kind = str(rope.get("rope_type")) if isinstance(rope, dict) else ""
        if "dynamic" in kind:
            return kind
        if kind == "longrope" and config.max_position_embeddings > rope.get("original_max_position_embeddings", 0):
            return kind
    return ""


def _windowed_layers(lm: PreTrainedModel) -> int:
    """How many layers must see less than all that is before, or 1 if the configuration does not say which."""
    config = lm.config.get_text_config()
    if kinds := getattr(config, "layer_types", None):
        return sum("sliding" in kind or "chunked" in kind for kind in kinds)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return int(bool(window) and window < config.max_position_embeddings)


@torch.no_grad()
def attend(
    trunk: Policy | Critic, kernel: str, sequence_parallel: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Go over to the attention ``kernel`` (a name, or ``auto``), and to rows that ``sequence_parallel`` ranks share,
    after comparing it on ``device`` with what ``check_packing`` has proved. A collective, of a sharded model; a critic
    is one that was not trained yet. Raises ``ModelError``."""
    config = trunk.lm.config.get_text_config()
    if kernel == "auto":
        kernel = attention.best_kernel(device, dtype, bool(getattr(config, "attn_logit_softcapping", None)))
    if config.num_attention_heads % sequence_parallel:
        raise ModelError(
            f"trainer.sequence_parallel = {sequence_parallel}: must divide the model's {config.num_attention_heads} "
            "attention heads"
        )
    if kernel != "blocks" and device.type != "cuda":
        raise ModelError(f"trainer.attention = {kernel}: needs a GPU; use auto or blocks")
    if kernel == "blocks" and sequence_parallel == 1:
        return
    if isinstance(trunk, Critic) and trunk.value_head is not None:
        trunk.value_head.weight.fill_(1.0)  # its values are all 0 else
    rows = _probe(trunk)
    expected = _packed(trunk, rows, device)
    trunk.kernel = attention.KERNELS[kernel]
    trunk.split = Split(sequence_parallel) if sequence_parallel > 1 else None
    what, remedy = f"trainer.attention: {kernel}", "use blocks"
    if sequence_parallel > 1:
        what, remedy = f"{what} with trainer.sequence_parallel = {sequence_parallel}", "use blocks, or 1"
    try:
        difference = float((_packed(trunk, rows, device) - expected).abs().mean() / expected.abs().mean())
    except (ImportError, RuntimeError, TypeError, ValueError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{what} does not work here: {line}; {remedy}") from error
    if not difference < (1e-4 if dtype == torch.float32 else 0.05):
        raise ModelError(f"{what} differs from blocks by {difference:.3g} of the mean output; {remedy}")
    if isinstance(trunk, FSDPModule):
        trunk.reshard()  # else the root's parameters stay whole for a backward, and the optimiser would be given those
    if isinstance(trunk, Critic) and trunk.value_head is not None:
        trunk.value_head.weight.zero_()


def _probe(trunk: Trunk) -> list[Tensor]:
    """A few short sequences."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(trunk.vocabulary, (n,), generator=generator) for n in (5, 9, 3)]


def _packed(trunk: Policy | Critic, rows: list[Tensor], device: torch.device) -> Tensor:
    """Logprobs (or values) of each row's tokens after its first, by one packed pass."""
    tokens = torch.cat(rows).to(device)
    inner = torch.cat([torch.arange(len(row)) < len(row) - 1 for row in rows]).to(device)
    positions = inner.nonzero()[:, 0]
    layout = Layout([len(row) for row in rows], device)
    if isinstance(trunk, Critic):
        values: Tensor = trunk(tokens, layout, positions)
        return values
    scores: Scores = trunk(tokens, layout, positions, tokens[positions + 1])
    return scores.logprobs


def shard(policy: Policy | Critic, mesh: DeviceMesh, dtype: torch.dtype, activation_checkpointing: bool) -> None:
    """FSDP2 in place: one unit per decoder layer, and one for the rest. Master weights and gradient sums stay float32;
    forward and backward compute in ``dtype``, but for values."""
    mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if dtype == torch.float32:
        mixed = MixedPrecisionPolicy()
    names = set(policy.lm._no_split_modules or ())
    for parent in list(policy.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in names:
                layer = checkpoint_wrapper(child) if activation_checkpointing else child
                setattr(parent, name, layer)
                fully_shard(layer, mesh=mesh, mp_policy=mixed)
    if policy.value_head is not None:
        fully_shard(policy.value_head, mesh=mesh)
    fully_shard(policy, mesh=mesh, mp_policy=mixed)


def compile_layers(policy: Policy | Critic, backend: str = "inductor") -> None:
    """torch.compile each decoder layer, for rows of any length. The attention stays as it is: its kernels are fused
    already, and how many blocks a row has would be compiled anew for every row."""
    names = set(policy.lm._no_split_modules or ())
    for module in policy.modules():
        if type(module).__name__.removeprefix("FSDP") in names:
            module.compile(dynamic=True, backend=backend)


def named_parameters(policy: Policy) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters under transformers' own names, whatever the modules are wrapped in; a tied one appears once."""
    for name, parameter in policy.lm.named_parameters():
        yield name.replace(_CHECKPOINT_PREFIX, ""), parameter


def critic_parameters(policy: Policy, critic: Critic | None) -> Iterator[tuple[str, nn.Parameter]]:
    """Those that learn values and are no part of the policy: of its value head, or of a model of its own."""
    if critic is not None:
        yield from ((f"critic.{name.replace(_CHECKPOINT_PREFIX, '')}", p) for name, p in critic.named_parameters())
    elif policy.value_head is not None:
        yield from ((f"critic.value_head.{name}", p) for name, p in policy.value_head.named_parameters())


def manifest(policy: Policy, version: int, dtype: torch.dtype) -> Manifest:
    """The weight set in its order of travel. Tied weights appear once, as in ``save_pretrained``. Raises
    ``ModelError``."""
    if buffers := policy.lm.state_dict().keys() & dict(policy.lm.named_buffers()).keys():
        what = f"{type(policy.lm).__name__} keeps weights in buffers ({min(buffers)})"
        raise ModelError(f"model.path: {what}, which cannot be exported")
    type_name = str(dtype).removeprefix("torch.")
    tensors = []
    for name, parameter in named_parameters(policy):
        meta = torch.empty(parameter.shape, device="meta")
        for saved, part in revert_weight_conversion(policy.lm, {name: meta}).items():
            tensors.append(TensorInfo(name=saved, shape=tuple(part.shape), dtype=type_name))
    whole = {n: torch.empty(p.shape, device="meta") for n, p in named_parameters(policy)}
    if sorted(t.name for t in tensors) != sorted(revert_weight_conversion(policy.lm, whole)):
        raise ModelError(f"model.path: the weights of {type(policy.lm).__name__} cannot be exported one by one")
    return Manifest(version=version, tensors=tuple(tensors))


def gather(
    policy: Policy, weights: Manifest, dtype: torch.dtype, limit: int, keep: bool
) -> Iterator[dict[str, Tensor]]:
    """The whole tensors in ``weights``' order, in buckets of at most ``limit`` bytes, cast to ``dtype``.

    A collective: every rank must run it to the end. Ranks that do not ``keep`` yield empty buckets and hold one tensor
    at a time. Tensors may share memory with the parameters: use them before the next step.
    """

    return in_buckets(policy, weights, limit, keep, whole(named_parameters(policy), dtype))


def whole(parameters: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """One after another, gathered on every rank: a collective."""
    for name, parameter in parameters:
        part = parameter.detach()
        part = part if lora.is_factor(name) else part.to(dtype)
        yield name, part.full_tensor() if isinstance(part, DTensor) else part


def exported(
    policy: Policy, parameters: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Whole ``parameters`` in the policy's order, as ``save_pretrained`` names and cuts them."""
    for name, parameter in lora.merged(parameters, policy.lora_scale, dtype):
        yield from revert_weight_conversion(policy.lm, {name: parameter}).items()


def in_buckets(
    policy: Policy, weights: Manifest, limit: int, keep: bool, parameters: Iterable[tuple[str, Tensor]]
) -> Iterator[dict[str, Tensor]]:
    """Whole ``parameters`` in the policy's order, as the buckets of ``gather``. Does not look at the policy's own."""
    dtype: torch.dtype = getattr(torch, weights.tensors[0].dtype)
    buckets = iter(weights.buckets(limit))
    wanted: set[str] = set()
    bucket: dict[str, Tensor] = {}
    for saved, tensor in exported(policy, parameters, dtype):
        if not wanted:
            wanted = {t.name for t in next(buckets)}
        wanted.remove(saved)
        if keep:
            bucket[saved] = tensor.contiguous()
        if not wanted:
            yield bucket
            bucket = {}
