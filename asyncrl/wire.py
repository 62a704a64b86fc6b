"""Messages shared by both ends of every socket, as msgspec structs.

Four conversations cross a process boundary:

* controller → inference server: SGLang's HTTP API as JSON (``Generate…``, ``Pause…``, ``Update…`` …). Field names and
  meaning are SGLang 0.5.23's; both the client (``engine/sglang.py``) and the embedded server (``serve/``) use these.
* controller → trainer's rank 0: msgpack over HTTP on loopback (``Train…``). Token columns travel as raw bytes.
* trainer → servers: weights, described by a manifest (``core/manifest.py``), over disk or a collective group.
* controller ⇄ relays: JSON over a WebSocket (``Relay…``); relay ⇄ relay or trainer: msgpack (``Fetch…``) before bytes.

Unknown keys are ignored when decoding, so that a newer SGLang does not break an older client.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from asyncrl.core.manifest import Manifest

# --- SGLang's HTTP API (JSON) -----------------------------------------------------------------------------------------


class SamplingParams(msgspec.Struct, kw_only=True):
    """Sampling of one request. ``temperature`` 0 is greedy; ``n`` replies are drawn for one prompt. All are sent: what
    is left out a server may have other defaults for."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_new_tokens: int = 0
    n: int = 1
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    stream_interval: int | None = None


class GenerateReq(msgspec.Struct, kw_only=True, omit_defaults=True):
    """POST /generate. ``rid`` names the request for /abort_request; SGLang aborts by prefix, so use fixed widths.
    ``kv_from`` only the embedded server knows: the URL of another one that holds KV of ``input_ids``."""

    input_ids: list[int]
    rid: str | None = None
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    return_logprob: bool = False
    stream: bool = False
    extra_key: str | None = None
    kv_from: str | None = None


class FinishReason(msgspec.Struct, kw_only=True, omit_defaults=True):
    """``type`` is ``stop``, ``length`` or ``abort``. An abort with a ``status_code`` is the server's own doing."""

    type: str
    message: str | None = None
    matched: int | str | None = None
    length: int | None = None
    status_code: int | None = None


class WeightSpan(msgspec.Struct, kw_only=True):
    """Output tokens ``start``…``end`` (exclusive) were sampled by weights ``version``."""

    version: str
    start: int
    end: int


class MetaInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Facts of a reply. ``output_token_logprobs`` rows are (logprob, token id, text or null)."""

    id: str = ""
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    weight_version: str = "default"
    weight_versions: list[WeightSpan] | None = None
    output_token_logprobs: list[tuple[float, int, str | None]] | None = None


class StreamError(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Why a stream ended: a stream's HTTP status is sent before its request has been looked at."""

    message: str = ""
    code: int = 400


class GenerateReply(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Reply of POST /generate, or one ``data:`` line of its stream.

    With ``n`` > 1 the reply is a list, and a stream's lines say with ``index`` which of the ``n`` they belong to.
    """

    index: int = 0
    error: StreamError | None = None
    text: str = ""
    output_ids: list[int] = msgspec.field(default_factory=list)
    meta_info: MetaInfo = msgspec.field(default_factory=MetaInfo)


class AbortReq(msgspec.Struct, kw_only=True, omit_defaults=True):
    """POST /abort_request."""

    rid: str = ""
    abort_all: bool = False


class PauseReq(msgspec.Struct, kw_only=True):
    """POST /pause_generation. ``abort`` answers running requests with what they have; ``retract`` re-queues them and
    recomputes their KV on continue; ``in_place`` freezes them with their KV."""

    mode: str = "abort"


class UpdateFromDiskReq(msgspec.Struct, kw_only=True, omit_defaults=True):
    """POST /update_weights_from_disk."""

    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True


class InitGroupReq(msgspec.Struct, kw_only=True):
    """POST /init_weights_update_group: join a process group of ``world_size``, whose rank 0 is the trainer."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str = "nccl"


class DestroyGroupReq(msgspec.Struct, kw_only=True):
    """POST /destroy_weights_update_group: leave that group."""

    group_name: str


class UpdateFromDistributedReq(msgspec.Struct, kw_only=True, omit_defaults=True):
    """POST /update_weights_from_distributed: receive these tensors, broadcast by rank 0 in this order.

    ``load_format`` ``flattened_bucket`` means one broadcast of all tensors as one uint8 vector. ``checksums``, of each
    tensor, only the embedded server knows, and compares.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str
    weight_version: str | None = None
    flush_cache: bool = True
    load_format: str | None = None
    checksums: list[int] | None = None


class StatusReply(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the weight and control endpoints answer."""

    success: bool = True
    message: str = ""


class ModelInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """GET /model_info. ``preferred_sampling_params`` are the server's defaults of what a request does not say."""

    model_path: str = ""
    weight_version: str = "default"
    model_type: str | None = None
    preferred_sampling_params: dict[str, Any] | str | None = None


class ServerInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """GET /server_info, the few fields that asyncrl reads. ``version`` is SGLang's (or asyncrl's, embedded),
    ``model_path`` the folder that it was started with."""

    version: str = ""
    model_path: str = ""
    max_running_requests: int | None = None
    max_total_num_tokens: int | None = None
    context_length: int | None = None
    max_req_input_len: int | None = None
    tp_size: int = 1
    dp_size: int = 1
    pp_size: int = 1
    incremental_streaming_output: bool = False
    enable_hierarchical_cache: bool = False
    kv_reuse: bool = False


class Load(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One entry of GET /v1/loads."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_used_tokens: int = 0
    max_total_num_tokens: int = 0
    gen_throughput: float = 0.0


class LoadsReply(msgspec.Struct, kw_only=True):
    """GET /v1/loads."""

    loads: list[Load]


class AttachStorageReq(msgspec.Struct, kw_only=True):
    """PUT /hicache/storage-backend; DELETE undoes it. Both only of a server without requests."""

    hicache_storage_backend: str
    hicache_storage_backend_extra_config_json: str
    hicache_write_policy: str = "write_through"


class KvKey(msgspec.Struct, kw_only=True, frozen=True):
    """What two servers must have alike for the KV of the one to be that of the other. ``model`` is a digest of the
    architecture and of the weights' checksums; ``shape`` is (layers, kv_heads, head_dim)."""

    version: str
    model: str
    dtype: str
    shape: tuple[int, int, int]


class KvReq(msgspec.Struct, kw_only=True, frozen=True):
    """POST /kv_cache, of one embedded server to another: the KV of the longest prefix of ``input_ids`` that it holds,
    if that is longer than ``beyond`` tokens.

    The answer is 204 if it is not, 409 with a line if ``key`` is not its own, else 200 with bytes: blocks of
    ``KV-Block`` tokens, ``KV-Tokens`` in all, each as (layers, 2, kv_heads, tokens, head_dim) and the 8 bytes of its
    checksum."""

    input_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]
    key: KvKey
    beyond: int = 0


# --- Controller ⇄ trainer (msgpack) -----------------------------------------------------------------------------------


class TrainSequence(msgspec.Struct, kw_only=True, frozen=True):
    """One trajectory as the trainer sees it, or one segment of it: a sequence in every mean. Columns are little-endian
    bytes, one entry a token: ``tokens`` int32, ``loss_mask`` int8, ``logprobs`` float32 (the engine's), ``versions``
    int32. ``advantage`` is that of every token with mask 1, unless there is a column ``advantages`` (float32) with one
    for each, or the trainer's critic makes them from ``turn_rewards``, of turns that end after so many tokens as
    ``turn_ends`` says. With ``continues`` it is the next segment of the trajectory of the sequence before it."""

    tokens: bytes
    loss_mask: bytes
    logprobs: bytes
    versions: bytes
    advantage: float = 0.0
    advantages: bytes = b""
    turn_ends: tuple[int, ...] = ()
    turn_rewards: tuple[float, ...] = ()
    continues: bool = False


class TrainReq(msgspec.Struct, kw_only=True, frozen=True):
    """POST /train_step. Training ``step`` takes the weights from version ``step`` to ``step + 1``.

    ``sequences`` are the batch in its order, without those that were fed: ``fed`` is the place of each of them in the
    batch. Empty: whatever was fed is forgotten, and the batch is whole."""

    step: int
    sequences: list[TrainSequence]
    fed: list[int] = []


class FeedReq(msgspec.Struct, kw_only=True, frozen=True):
    """POST /feed: sequences that will be in ``step``'s batch, in its first mini-batch, for the trainer to begin with.
    ``start`` of them were fed before; 0 begins anew. Answered when their passes are done (``micro_batches``, on each
    rank), or at once if they wait for more, to fill one."""

    step: int
    start: int
    sequences: list[TrainSequence]


class TrainReply(msgspec.Struct, kw_only=True, frozen=True):
    """Metrics of one step (``loss``, ``grad_norm``, ``lr``, ``tokens``, ``ratio_mean`` …), and the version reached.
    Also the answer to /feed, /publish, /open_group, /join_group, /save, /saved and /shutdown. With ``error`` set,
    nothing has changed. ``checksum`` is that of the weights that the last step made (``ports.StepResult``),
    ``checksums`` are those of the staged tensors and ``outlets`` as in ``TrainerInfo``."""

    version: int
    metrics: dict[str, float]
    checksum: int = 0
    checksums: list[int] = []
    outlets: list[str] = []
    error: str | None = None


class PublishReq(msgspec.Struct, kw_only=True, frozen=True):
    """POST /publish: one part of moving weights. ``disk``: write the current weights, ``version``, to the folder
    ``path``. ``stage``: gather them into rank 0's memory. ``hold``: keep what is staged as ``version`` until it was
    broadcast, whatever is staged meanwhile. ``collective``: broadcast what is held over the update group, while the
    servers receive; like ``hold`` it needs nothing of the ranks, so a train step may run meanwhile.
    ``relay``: each rank copies its share into memory that it offers to relays, at the answer's ``outlets``."""

    version: int
    transport: str
    path: str = ""


class OpenGroupReq(msgspec.Struct, kw_only=True, frozen=True):
    """POST /open_group: rank 0 listens at ``address`` for the other members of an update group; the metric ``port`` of
    the answer says where. POST /join_group, without a body, makes it rank 0 of the group, while the servers join."""

    address: str
    world_size: int
    group_name: str
    backend: str


class SaveReq(msgspec.Struct, kw_only=True, frozen=True):
    """POST /save: begin a checkpoint ``folder/version-N`` of the current weights, version N: a Hugging Face folder that
    ``from_pretrained`` loads, with the trainer's state in it. Answered when training may go on. POST /saved, without a
    body, is answered when it is on the disk, or has failed."""

    folder: str


class TrainerInfo(msgspec.Struct, kw_only=True, frozen=True):
    """GET /health of the trainer: ready once it answers. ``checksum`` is that of its last step, 0 before the first;
    ``checksums`` those of the staged tensors, if any, in the order of ``names``. ``outlets`` are where relays take the
    version that was offered to them last, together (``host:port``)."""

    version: int
    checksum: int = 0
    world_size: int
    backend: str
    parameters: int
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    checksums: list[int] = []
    outlets: list[str] = []
    doing: str = ""
    """What the job does now: the step and its micro-batch; empty between two commands."""


# --- Relays -----------------------------------------------------------------------------------------------------------


class RelayOrders(msgspec.Struct, kw_only=True, frozen=True):
    """Controller → relay, over /control: ``core.relay_chain.Orders`` of ``run``. What it holds of another run is
    dropped first: version numbers mean something within a run only."""

    run: str
    sources: tuple[str, ...] = ()
    versions: tuple[int, ...] = ()
    link: str = "tcp"
    """How bytes come: over the connections to the sources, or by ``nixl``."""


class RelayState(msgspec.Struct, kw_only=True, frozen=True):
    """Relay → controller, over /control, at every change and as a heartbeat; also GET /state. ``data_port`` is where
    others take weights from it, ``folder`` where version N lies complete as ``vN``. ``received`` counts the bytes of
    weights that came over the wire since it was started, ``refused`` those that were corrupt. ``error`` is why it
    cannot take version ``unable``, in one line."""

    run: str
    data_port: int
    folder: str
    versions: list[int]
    received: int = 0
    refused: int = 0
    unable: int | None = None
    error: str = ""


class FetchReq(msgspec.Struct, kw_only=True, frozen=True):
    """Send the file of ``version`` (``core/weight_file.py``) from byte ``offset`` on."""

    run: str
    version: int
    offset: int
    token: str = ""
    link: str = "tcp"


class Door(msgspec.Struct, kw_only=True, frozen=True):
    """Memory that NIXL reads: what its ``agent`` says of itself, and the ``address`` of the file's first byte."""

    agent: bytes
    address: int


class FetchReply(msgspec.Struct, kw_only=True, frozen=True):
    """Before the bytes. Without a ``manifest`` the version is not there, nor on its way, and none follow. ``spans`` are
    the parts of the file (start, end), perhaps none, that this one has, where it does not have all: only they follow.
    With a ``door`` the bytes are read through it, and what follows says how many are there (weights/nixl.py). ``error``
    is why it cannot give by the link asked for, or not to that one. The manifest is without checksums: nothing waits
    for them (``FetchEnd``)."""

    manifest: Manifest | None = None
    spans: tuple[tuple[int, int], ...] | None = None
    door: Door | None = None
    error: str = ""


class FetchEnd(msgspec.Struct, kw_only=True, frozen=True):
    """After the bytes: the tensors' checksums, or what the parts that this one gave add to them."""

    checksums: dict[str, int]
