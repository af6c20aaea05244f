"""The plan of a config: what it prints and refuses, and on a TPU's compiler that no dense form has come back."""

import functools
import importlib.util
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from experiments.scale.hlo import parse
from experiments.scale.hlo_cost import measure
from jaxrl_llm.config import loading
from jaxrl_llm.ground import sharding
from jaxrl_llm.models import Model, ModelConfig
from jaxrl_llm.models.experts.implementations import apply_experts
from jaxrl_llm.models.selected_logprobs import selected_logprobs
from jaxrl_llm.plan.__main__ import main
from jaxrl_llm.plan.chips import CHIPS, lowering_for, topology_devices
from jaxrl_llm.plan.jaxpr_flops import flops_of
from jaxrl_llm.plan.programs import Part, turns
from jaxrl_llm.plan.roofline import bytes_of, roofline
from jaxrl_llm.plan.table import Compiled, Plan, as_rows, compile_for, measured, table, trace_run
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.sampling import Sampling
from jaxrl_llm.run.assembly import build
from jaxrl_llm.run.settings import validate
from tests.reference import tiny_run

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="compiling for TPUs is optional: pip install 'jax[tpu]'"
)
needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="compiling for GPUs is optional: pip install jax[cuda13]",
)
# A mixture of experts with 16 experts, of which a token uses 2: the dense form would be 8 times the work.
MIXTURE = {
    "model.num_hidden_layers": 2,
    "model.hidden_size": 128,
    "model.num_experts": 16,
    "model.moe_intermediate_size": 512,
    "model.dtype": "bfloat16",
    "rollout.prompts": 4,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 60,
    "updates.minibatches": 1,
    "replay.mode": "R3",
}
DENSE = {"model.num_experts": 0, "replay.mode": "off", "rollout.prompts": 8}


def planned(topology, folder, *arguments, **fields):
    """(the parts of a plan, what was printed) of the command in a process of its own, where shapes stand for arrays."""
    line = ["--config", "gspo:smoke", "--topology", topology, "--json", str(folder / "plan.json"), *arguments]
    line += [f"--config.{name}={value}" for name, value in (MIXTURE | fields).items()]
    ran = subprocess.run(
        [sys.executable, "-m", "jaxrl_llm", "plan", *line], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return {part["part"]: part for part in json.loads((folder / "plan.json").read_text())["parts"]}, ran.stdout


def test_the_flops_of_a_program_are_those_of_its_products():
    """A scan of 5, a loop of a run-time bound, the costlier branch, and a product on each of four devices."""
    x, mesh = jnp.ones((8, 8)), sharding.make_mesh((1, 4, 1, 1))
    each, rows = 2.0 * 8**3, jax.sharding.PartitionSpec("fsdp")

    def program(x, n):
        scanned = jax.lax.scan(lambda c, _: (c @ x, None), x, None, length=5)[0]
        looped = jax.lax.fori_loop(0, n, lambda _, c: c @ x @ x, scanned)
        branched = jax.lax.cond(n > 1, lambda c: c @ x, lambda c: c, looped)
        mapped = jax.shard_map(lambda part: part @ jnp.ones((8, 8)), mesh=mesh, in_specs=rows, out_specs=rows)
        return mapped(branched)

    assert flops_of(jax.jit(program).trace(x, 3).jaxpr.jaxpr, 4) == (7 * each, 2 * each)


def test_the_flops_of_loops_within_loops():
    """Per turn of the outer loop: a scan of 2 in a scan of 3, a function's product, and on each of four devices a round
    that is usually the only one; outside it such a round is no turn. A loop of a run-time bound in another: none."""
    x, mesh = jnp.ones((8, 8)), sharding.make_mesh((1, 4, 1, 1))
    each, rows = 2.0 * 8**3, jax.sharding.PartitionSpec("fsdp")

    def rounds(c, n):
        with jax.named_scope("usually_once"):
            return jax.lax.while_loop(lambda carry: carry[0] < n, lambda carry: (carry[0] + 1, carry[1] @ x), (0, c))[1]

    def twice(c, _):
        return jax.lax.fori_loop(0, 2, lambda _, c: c @ x, c), None

    def program(x, n):
        def turn(_, c):
            nested = jax.lax.scan(twice, c, None, length=3)[0]
            called = jax.jit(lambda c: c @ x)(nested)
            on_device = jax.shard_map(functools.partial(rounds, n=n), mesh=mesh, in_specs=rows, out_specs=rows)
            refilled = jax.lax.while_loop(lambda c: c[0, 0] < n, lambda c: c @ x, called)
            return on_device(jnp.tile(refilled, (4, 1)))[:8]

        return jax.lax.fori_loop(0, n, turn, rounds(x, n))

    assert flops_of(jax.jit(program).trace(x, 3).jaxpr.jaxpr, 4) == (each, (3 * 2 + 1 + 4) * each)


def test_a_kernel_whose_grid_the_run_knows_counts_its_most_blocks():
    """Of 512 rows in 4 groups megablox multiplies at most 4 + 3 tiles of 128 rows, each by 2 tiles of columns."""
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, 128), (4, 128, 256))]
    run = functools.partial(gmm, preferred_element_type=jnp.float32, tiling=(128, 128, 128))
    traced = jax.make_jaxpr(run)(*shapes, jax.ShapeDtypeStruct((4,), jnp.int32))
    assert flops_of(traced.jaxpr, 1) == (14 * 2.0 * 128**3, 0)


def test_the_roofline():
    """100 GFLOP and 1 GB of a v5e: 0.51 and 1.2 ms; 2 x 3 x 1e6 x 8000 / 4 FLOPs of the model."""
    part = Part("update", 1, 1, tokens=8000, times=2, passes=3)
    line = roofline(part, 1e11, 1e9, CHIPS["v5e"], devices=4, active_parameters=10**6)
    assert (round(line.compute_s, 6), round(line.memory_s, 6), line.bound) == (508e-6, 1.221e-3, "memory")
    assert line.seconds == line.memory_s
    assert line.flops_over_model == pytest.approx(1e11 / 1.2e10)
    assert line.mfu == pytest.approx(1.2e10 / (line.memory_s * 197e12))
    move = roofline(Part("move", 1, 1, tokens=0, times=1, passes=0), 0.0, 1e9, CHIPS["v5e"], 4, 10**6)
    assert (move.bound, move.flops_over_model, move.mfu) == ("memory", 0.0, 0.0)


def test_the_bytes_that_a_part_moves(tmp_path):
    """In float32 on one device: weights once in a forward and three times in an update, for each turn; an update reads
    and writes weights and both moments."""
    run = build(validate(tiny_run.make_config(tmp_path)), jax.devices()[:1])
    weights = 4 * sum(x.size for x in jax.tree.leaves(run.model.shapes()))
    for name, passes, count in (("move", 0, 2), ("score", 1, 3), ("update", 3, 3 * 3 + 2 * 3)):
        assert bytes_of(run, Part(name, 1, 3, tokens=64, times=1, passes=passes)) == count * weights


def test_the_table_fits_a_terminal():
    """At the size of a 30 B model."""
    parts = [Part(name, 1, 1, tokens=262144, times=12288, passes=3) for name in ("prefill", "decode")]
    lines = [(part, roofline(part, 5.2e14, 9.5e12, CHIPS["v5p"], 64, 3_300_000_000)) for part in parts]
    program = Compiled("rollout", 6 * 2**30, 2**30, 45 * 2**30, 2**20, tuple(lines))
    made = Plan("v5p:4x4x4", CHIPS["v5p"], (1, 4, 16, 1), (4, 1, 1, 16), (program,))
    printed = table(made).splitlines()
    assert max(map(len, printed)) <= 80
    assert printed[1] == "rollouts on data 4 x fsdp 1 x expert 1 x tensor 16"
    assert any("45.00" in line and "59%" in line for line in printed)  # of 95e9 bytes
    assert as_rows(made)[1]["step_s"] == pytest.approx(12288 * 9.5e12 / 2765e9)
    assert any(line.split()[:2] == ["decode", "12288"] for line in printed)


def test_a_plan_that_is_only_traced(tmp_path):
    """Its memory is of what stays, in an update parameters and two moments; the times are those of a compiled plan."""
    settings = validate(tiny_run.make_config(tmp_path))
    run = build(settings, jax.devices()[:1])
    (program,) = trace_run(run, jax.devices()[:1], ["update"])
    found = measured(run, program, None, CHIPS["v5e"])
    weights = 4 * sum(x.size for x in jax.tree.leaves(run.model.shapes()))
    assert found.arguments == pytest.approx(3 * weights, rel=0.01)
    assert found.memory == found.arguments
    assert found.parts[0][1].flops > 0
    printed = table(Plan("v5e:1x1", CHIPS["v5e"], (1, 1, 1, 1), (1, 1, 1, 1), (found,)))
    assert "not compiled: weights and state" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_fewer_slots_than_answers_take_more_steps():
    """16 answers of 6 tokens to 4 prompts: a slot takes one answer after the other and feeds five tokens of each; with
    6 slots two prompts are prefilled at a time."""
    assert turns(prompts=4, group_size=4, slots=16, answer_length=6) == (4, 1, 5)
    assert turns(prompts=4, group_size=4, slots=6, answer_length=6) == (2, 2, 15)


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        ("h10:8", r"has no known chip \(did you mean 'h100'\?\)"),
        ("v5p", "lacks its shape, for example v5p:4x4x4"),
        ("v5p:2xx2", "lacks its shape"),
        ("h100:2x4", "must name a number of GPUs"),
        ("h100:8:2", "must name a number of GPUs"),
        ("b200:12", "must be nodes of 8 GPUs, for example b200:8"),
        ("v5e:4x4:0", "must end in a number of slices or in none, for example v5e:4x4:2"),
        ("v5e:4x4:2:2", "must end in a number of slices"),
    ],
)
def test_topologies_that_are_none(topology, message):
    with pytest.raises(ValueError, match=message):
        topology_devices(topology)


def test_a_compiler_that_is_not_installed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    assert main(["--config", "gspo:smoke", "--topology", "v5e:2x2"]) == 2
    assert "pip install jaxrl_llm[tpu]" in capsys.readouterr().err


@needs_libtpu
def test_no_dense_form_on_tpus(tmp_path):
    """An update on 4 chips that share the experts: FLOPs of the experts used, their weights where they are."""
    fields = {"mesh.shape": "(1,1,4,1)", "rollout.prompts": 64}
    parts, printed = planned("v5e:2x2", tmp_path, "--only", "update", **fields)
    assert max(map(len, printed.splitlines())) <= 80
    # All experts would be 8 times. Every block of the kernels' grids counts, and an even load leaves many of them out.
    assert 0.9 < parts["update"]["flops_over_model"] < 4


@needs_cuda
@pytest.mark.parametrize("mesh", ["(1,4,1,1)", "(1,1,4,1)"])
def test_no_dense_form_on_gpus(tmp_path, mesh):
    """The same update on 4 H100s that share parameters or experts; no kernel of unknown FLOPs."""
    parts, _ = planned("h100:4", tmp_path, "--only", "update", **{"mesh.shape": mesh})
    update = parts["update"]
    assert 0.9 < update["flops_over_model"] < 1.6


@needs_libtpu
@pytest.mark.parametrize("shape", [(1, 4, 16, 1), (1, 64, 1, 1)])
def test_weights_in_slices_are_gathered_over_the_whole_torus(shape):
    """By flags.py; without it the gather is an all-reduce of zeros and the own slice, which sends twice as much."""
    _, devices = topology_devices("v5p:4x4x4")
    mesh = sharding.make_mesh(shape, devices)
    axes = {"x": ("rows", None), "w": ("embed", "mlp"), "y": ("rows", None)}
    sizes = {"x": (64, 128), "w": (128, 256), "y": (64, 256)}
    where = {name: jax.NamedSharding(mesh, sharding.spec(axes[name], sizes[name], mesh)) for name in sizes}
    x, w = (jax.ShapeDtypeStruct(sizes[name], jnp.bfloat16, sharding=where[name]) for name in "xw")
    program = jax.jit(jnp.matmul, out_shardings=where["y"]).lower(x, w).compile().as_text()
    assert "all-gather" in program
    assert "all-reduce" not in program


@needs_libtpu
@pytest.mark.parametrize(
    ("topology", "shape"),
    [
        ("v5p:4x4x4", (1, 64, 1, 1)),
        ("v5p:4x4x4", (1, 4, 16, 1)),
        ("v5e:2x2", (1, 4, 1, 1)),
        ("v5e:16x16", (1, 256, 1, 1)),
    ],
)
def test_gradients_of_experts_are_scattered(topology, shape):
    """And not summed whole on every device, which sends twice as much: the sums of each weight [e d f]."""
    _, devices = topology_devices(topology)
    mesh, (n, e, d, f) = sharding.make_mesh(shape, devices), (8192, 128, 2048, 768)  # of Qwen3-30B-A3B
    axes = {"x": ("rows", None), "k": ("rows", None), "g": ("expert", "embed", "mlp"), "d": ("expert", "mlp", "embed")}
    sizes = {"x": (n, d), "k": (n, 2), "g": (e, d, f), "d": (e, f, d)}
    where = {name: jax.NamedSharding(mesh, sharding.spec(axes[name], sizes[name], mesh)) for name in sizes}

    def loss(weights, x, experts, gates):
        return jnp.sum(apply_experts(x, experts, gates, *weights, mesh=mesh).astype(jnp.float32))

    def array(name, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes[name], dtype, sharding=where[name])

    weights = array("g"), array("g"), array("d")
    gradient = jax.jit(jax.grad(loss), out_shardings=(where["g"], where["g"], where["d"]))
    with lowering_for(devices[0]):
        lowered = gradient.lower(weights, array("x"), array("k", jnp.int32), array("k", jnp.float32))
    once, turn = measure(parse(lowered.compile().as_text()), mesh.size)
    sums = (once + turn).collectives
    assert sums["reduce-scatter"][1] > 0
    assert sums.get("all-reduce", (0, 0))[1] < sums["reduce-scatter"][1] / 100  # the number of rounds


@needs_libtpu
@pytest.mark.parametrize(("topology", "shape"), [("v5e:2x2", (1, 4, 1, 1)), ("v5e:16x16", (1, 256, 1, 1))])
def test_the_gradient_of_a_head_of_1187_tiles_is_scattered(topology, shape):
    """The vocabulary of Qwen3; without padding it is summed on every device."""
    _, devices = topology_devices(topology)
    mesh = sharding.make_mesh(shape, devices)
    axes, sizes = {"x": ("tokens", None), "y": ("tokens",), "w": ("embed", "vocab")}, {"x": (1024, 2048), "y": (1024,)}
    sizes["w"] = (2048, 1187 * 128)
    where = {name: jax.NamedSharding(mesh, sharding.spec(axes[name], sizes[name], mesh)) for name in sizes}
    x, y, w = (
        jax.ShapeDtypeStruct(sizes[name], dtype, sharding=where[name])
        for name, dtype in (("x", jnp.bfloat16), ("y", jnp.int32), ("w", jnp.bfloat16))
    )

    def loss(w, x, y):
        return jnp.sum(selected_logprobs(x, w, y, mesh=mesh)[0])

    with lowering_for(devices[0]):
        lowered = jax.jit(jax.grad(loss), out_shardings=where["w"]).lower(w, x, y)
    sums = measure(parse(lowered.compile().as_text()), mesh.size)[0].collectives
    assert sums["reduce-scatter"][1] > 100 * sums.get("all-reduce", (0, 0))[1]


def decode_step(count, **fields):
    """(the work of one step, bytes of the weights) of a chip of four v5e: 8 answers of 1,024 tokens to each of `count`
    prompts of 128, compiled in bfloat16."""
    _, devices = topology_devices("v5e:2x2")
    config = ModelConfig(**fields, dtype="bfloat16", param_dtype="bfloat16")
    model = Model(config, sharding.make_mesh((4, 1, 1, 1), devices))
    engine = Engine(model, Sampling(), group_size=8, max_new_tokens=1025, end_ids=(1,), dtype="bfloat16")
    with lowering_for(devices[0]):
        lowered = engine.trace(model.shapes(), count=count, width=128).lower()
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(model.shapes()))
    return measure(parse(lowered.compile().as_text()), 4)[1], weights


@needs_libtpu
@pytest.mark.parametrize("num_experts", [0, 16])
def test_a_decode_step_of_stacks_copies_none(num_experts):
    """It moves little more than the weights and the caches of a chip, each read once, in one loop over all layers."""
    sizes = {"vocab_size": 1024, "num_hidden_layers": 12, "hidden_size": 512, "intermediate_size": 1536}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128}
    mixture = {"num_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    turn, weights = decode_step(count=4, **sizes, **heads, **mixture)
    caches = 2 * 2 * 12 * 4 * 128 * (8 * 1024 + 128)  # bfloat16; keys and values of a chip's answers and their prompt
    assert turn.bytes < 1.2 * (caches + weights)
    assert turn.sent < 1e5


@needs_libtpu
@pytest.mark.slow
def test_a_decode_step_reads_its_latents_twice():
    """For scores and for values, and the rotated keys of one layer at a time: of DeepSeek-V2-Lite's depth and heads'
    sizes, 64 answers a chip. With a copy of all layers' rotated keys for each layer it would be 4.2 times."""
    sizes = {"vocab_size": 1024, "num_hidden_layers": 27, "hidden_size": 512, "intermediate_size": 1536}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 192, "v_head_dim": 128}
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_norm": "none", "rope_interleave": True}
    turn, weights = decode_step(count=32, **sizes, **heads, **latent)
    cache = 2 * 27 * (512 + 64) * (64 * 1024 + 8 * 128)  # bfloat16; a chip's answers and their prompts
    assert weights + cache < turn.bytes < 1.2 * (weights + 2 * cache)


@needs_libtpu
def test_a_topology_that_libtpu_lacks():
    with pytest.raises(ValueError, match="none that libtpu knows"):
        topology_devices("v5e:3x5")


@pytest.mark.slow
def test_every_program_of_a_run():
    """On four devices, rollouts on a mesh of their own: 4 x 4 answers, prompts of 4 tokens, answers of 4."""
    fields = [("mesh.shape", "(1,2,2,1)"), ("replay.mode", "R3"), ("objective.kl_coef", "0.1")]
    fields += [("rollout.mesh_shape", "(1,1,1,4)"), ("model.num_hidden_layers", "1"), ("updates.minibatches", "1")]
    settings = validate(loading.load(loading.find("gspo:smoke"), fields))
    devices = jax.devices()[:4]
    found = {}
    for program in trace_run(build(settings, devices), devices):
        once, turn = measure(parse(compile_for(program, devices).as_text() or ""), 4)
        walked = flops_of(program.traced.jaxpr.jaxpr, 4)
        found[program.name] = [part.tokens for part in program.parts]
        for part in program.parts:
            by_hlo = (once * part.outside + turn * part.turns).flops
            by_jaxpr = (walked[0] * part.outside + walked[1] * part.turns) / 4
            assert by_jaxpr == pytest.approx(by_hlo, rel=0.15)  # XLA pads what 4 devices do not divide
    assert found == {"move": [0], "rollout": [16, 16], "score": [128], "update": [128]}
