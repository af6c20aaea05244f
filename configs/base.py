"""Every field of a run, one comment each. Other configs are small deltas on this one; it is a run by itself too.

Command:  python -m jaxrl_llm.main --config configs/base.py --workdir runs/base
Minutes:  about 2 on two CPU cores (GRPO on sorting ten digits with the tiny MoE)
Expect:   reward/mean from about 0.7 to about 0.9; add :smoke for a whole run in under a minute

`--config NAME` is this config with `objective.name=NAME` for every recipe that has no file of its own. The fields are
written from their declarations by `python -m tests.run.test_settings`; docs/configuration.md has types and ranges.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from jaxrl_llm import objectives


def get_config(variant: str = "") -> ConfigDict:
    config = ConfigDict()
    config.seed = 0  # seed of parameters, prompts, sampling and shuffling
    config.steps = 60  # rollouts

    config.task = ConfigDict()  # The task, and the text around its prompts
    config.task.name = "sort"  # see docs/tasks.md
    config.task.options = ConfigDict({"digits": 10})  # the task's own options, each set as task.options.NAME
    config.task.data_dir = ""  # folder of the data; empty: the user's cache folder
    config.task.tokenizer = ""  # folder of tokenizer.json, GGUF file, hub name; empty: the checkpoint's, or the task's
    config.task.template = "{prompt}"  # text around every prompt, for example worked examples before it
    config.task.chat = False  # wrap that in the tokenizer's chat template
    config.task.system = ""  # system message of the chat; empty: none, or the template's own
    config.task.chat_options = ConfigDict()  # other variables of the chat template: `{"enable_thinking": False}`
    config.task.date = ""  # today for a chat template that names it, YYYY-MM-DD; empty: the day of the first start
    config.task.verify_truncated = False  # verify answers cut off by the length bound; otherwise they get 0
    config.task.keep_turns = False  # keep earlier turns as sampled where the chat template rewrites them
    config.task.think_end_token = ""  # verify only what follows the last of it, such as </think>; without it: 0

    config.model = ConfigDict()  # Names as in the published configurations of Qwen3-MoE, GLM-4.5 and Granite
    config.model.pretrained = ""  # path or hub name of a checkpoint; no size may differ from it; empty: fresh weights
    config.model.vocab_size = placeholder(int)  # None: the tokenizer's, or the checkpoint's
    config.model.num_hidden_layers = 3
    config.model.hidden_size = 64
    config.model.intermediate_size = 128  # SwiGLU width of dense layers
    config.model.num_attention_heads = 4
    config.model.num_key_value_heads = 2  # divides the number of attention heads
    config.model.head_dim = 16  # even: RoPE rotates pairs
    config.model.num_experts = 8  # 0: a dense model
    config.model.num_experts_per_tok = 2
    config.model.moe_intermediate_size = 32  # SwiGLU width of one expert
    config.model.norm_topk_prob = True  # the gates of a token's experts sum to 1
    config.model.decoder_sparse_step = 1  # every n-th layer has experts
    config.model.mlp_only_layers = ()  # layers that stay dense
    config.model.scoring_func = "softmax"  # softmax | sigmoid: of router logits
    config.model.selection_bias = False  # a frozen bias of each expert that decides the choice, never the gates
    config.model.n_group = 1  # groups of experts, of which a token uses the best
    config.model.topk_group = 1  # groups that a token uses
    config.model.group_score = "top2"  # top2 | max: a group's two best scores, or its best (DeepSeek-V2)
    config.model.routed_scaling_factor = 1.0  # factor of the gates
    config.model.shared_expert_intermediate_size = 0  # width of an expert that every token uses; 0: none
    config.model.shared_expert_gate = False  # its output is weighted by a sigmoid of the state (Qwen2-MoE)
    config.model.expert_bias = False  # biases of the router and of experts (gpt-oss)
    config.model.swiglu_limit = 0.0  # clamp of the experts' SwiGLU of gpt-oss; 0: SwiGLU as it is
    config.model.qk_norm = "head"  # none (Llama, Qwen2) | head (Qwen3) | full (OLMoE): RMSNorm of q and k
    config.model.attention_bias = False  # biases of q, k and v (Qwen2)
    config.model.attention_output_bias = False  # a bias of o (gpt-oss)
    config.model.attention_sinks = False  # a learned score of each head for no column at all (gpt-oss)
    config.model.sliding_window = 0  # columns that a token of a sliding layer sees; 0: all
    config.model.layer_types = ()  # sliding_attention, full_attention or linear_attention; (): all are alike
    config.model.attn_output_gate = False  # attention's output is weighted by a sigmoid of the state (Qwen3-Next)
    config.model.linear_num_key_heads = 0  # of layers with linear_attention, the gated delta rule; 0: none
    config.model.linear_num_value_heads = 0  # a multiple of linear_num_key_heads
    config.model.linear_key_head_dim = 0  # rows of a head's state
    config.model.linear_value_head_dim = 0  # columns of a head's state
    config.model.linear_conv_kernel_dim = 4  # tokens that their convolution sees
    config.model.kv_lora_rank = 0  # width of the latent that keys and values come from (DeepSeek); 0: none
    config.model.q_lora_rank = 0  # width of a latent that queries come from; 0: none
    config.model.qk_rope_head_dim = 0  # with a latent: the last of head_dim, which RoPE rotates
    config.model.v_head_dim = 0  # with a latent: the size of a head's values
    config.model.attention_multiplier = 0.0  # factor of attention scores; 0: head_dim^-1/2
    config.model.rope_theta = 10000.0
    config.model.partial_rotary_factor = 1.0  # share of head_dim that RoPE rotates, the first
    config.model.rope_scaling = ()  # Llama 3: factor, low and high frequency factor, original length; (): none
    config.model.rope_type = "llama3"  # llama3 | linear | yarn | dynamic: of rope_scaling, see docs/models.md
    config.model.rope_interleave = False  # RoPE rotates neighbours, not the halves of a head (ERNIE)
    config.model.sliding_rope_theta = 0.0  # of sliding layers, without scaling; 0: that of others
    config.model.no_rope_layers = ()  # layers without RoPE (SmolLM3)
    config.model.rms_norm_eps = 1e-6
    config.model.norm_offset = False  # norms multiply by 1 + scale (Gemma 3)
    config.model.norm_placement = "pre"  # pre | post | sandwich: before parts of a block, behind (OLMo 3), both (GLM-4)
    config.model.hidden_act = "silu"  # silu (SwiGLU) | gelu_tanh (Gemma 3): of dense layers
    config.model.tie_word_embeddings = False
    config.model.embedding_multiplier = 1.0  # factor of embeddings (Granite)
    config.model.residual_multiplier = 1.0  # factor of what a block adds (Granite)
    config.model.logits_scaling = 1.0  # divisor of logits (Granite)
    config.model.param_dtype = "float32"  # float32 | bfloat16: in bfloat16 small updates are lost
    config.model.dtype = "float32"  # float32 | bfloat16: of the computation; router and logits stay float32
    config.model.numerics = "fast"  # fast (the quickest kernels) | exact (sampler and trainer agree to the last bit)
    config.model.remat = "none"  # none | block | dots: what the backward pass recomputes
    config.model.experts_implementation = "auto"  # auto | dense | grouped | blocks
    config.model.attention_implementation = "auto"  # auto | plain | flash

    config.lora = ConfigDict()  # Low-rank adapters on a frozen base, which is the start of the run and the reference
    config.lora.rank = 0  # 0 trains every parameter
    config.lora.alpha = 16.0  # the change of a weight is scaled by alpha / rank
    config.lora.targets = "attention,mlp"  # some of attention, mlp (dense layers and experts), router

    config.warm_start = ConfigDict()  # Supervised training before RL, cached and shared by equal runs
    config.warm_start.steps = 160  # most steps; 0: start from scratch
    config.warm_start.target_pass_rate = 0.0  # stop as soon as sampled pass@1 reaches it; 0: take all steps
    config.warm_start.evaluate_every = 20  # steps between reports, with pass rates if there is a target
    config.warm_start.batch_size = 64  # answers per step
    config.warm_start.learning_rate = 3e-3
    config.warm_start.seed = 0  # seed of its parameters and batches, independent of the run's seed
    config.warm_start.cache_dir = ""  # empty: the user's cache folder

    config.rollout = ConfigDict()  # How answers are sampled
    config.rollout.prompts = 32  # prompts per step
    config.rollout.group_size = 8  # G, answers to each prompt; of pairs 2, of supervised training 1
    config.rollout.max_prompt_length = 0  # tokens; 0: the task's own bound
    config.rollout.max_new_tokens = 0  # tokens of an answer, EOS included; 0: the task's own bound
    config.rollout.max_turns = 0  # answers of an episode: docs/environments.md; 0: the task's own bound
    config.rollout.max_observation_length = 0  # tokens between two answers; 0: the task's own bound
    config.rollout.max_episode_length = 0  # tokens of prompt, answers and observations; 0: no bound of its own
    config.rollout.temperature = 1.0  # 0 is greedy, which training refuses
    config.rollout.top_k = 0  # most tokens to draw from; 0 keeps every one
    config.rollout.top_p = 1.0  # draw from the fewest tokens with this much probability; trains with a top_k
    config.rollout.min_p = 0.0  # drop tokens below this share of the largest probability; likewise
    config.rollout.allow_truncated = False  # train on cut samples as if they were not: biased, as earlier versions did
    config.rollout.slots = 0  # answers decoded at once (continuous batching), which bounds memory; 0: all
    config.rollout.lag = 0  # steps from asking for a rollout to training on it: docs/lag.md
    config.rollout.prompt_buckets = 1  # a step's prompts are cut to one of so many widths; each compiles once
    config.rollout.dtype = "float32"  # float32 | bfloat16 | float8_e4m3 (weights): of the sampler; bfloat16: a mismatch
    config.rollout.router_dtype = "float32"  # float32 | bfloat16: of the sampler's router; bfloat16: a mismatch
    config.rollout.router_noise = 0.0  # standard deviation of noise on the sampler's router logits, on purpose
    config.rollout.router_bias = 0.0  # standard deviation over experts of a bias on them, fixed and equal by layer
    config.rollout.router_gates = "same"  # same (of what chooses) | exact (noise and bias move only the choice)
    config.rollout.mesh_shape = ()  # mesh to sample and evaluate on, of the same devices; (): mesh.shape
    config.rollout.engine = "jax"  # jax (the run's devices) | vllm (servers: docs/engines.md): of training's answers
    config.rollout.servers = ()  # of vLLM, http://host:port each; (): one that `launch` starts
    config.rollout.launch = ""  # environment with vLLM that servers are started in on this machine; empty: they run
    config.rollout.weights_dir = ""  # folder that trainer and servers see; empty: this machine's memory
    config.rollout.weights_by = "folder"  # folder (weights_dir) | http (sent to them): how servers get weights
    config.rollout.deadline_s = 300.0  # seconds for an answer of a server, which is then asked for again

    config.dynamic_sampling = ConfigDict()  # DAPO: replace groups whose task rewards are all alike
    config.dynamic_sampling.max_draws = 1  # most rollouts per step; 1: off

    config.rewards = ConfigDict()  # The sum of weight * source over the sources below; each is logged apart
    config.rewards.verifier_weight = 1.0  # of the task's verifier; at 0 it is still asked, for the metrics
    config.rewards.functions = ()  # others: exact, numeric, math, file.py:function, module:function
    config.rewards.function_weights = ()  # of each of them; (): 1
    config.rewards.reward_model = ""  # DIR of a run of configs/reward_model.py; empty: none
    config.rewards.reward_model_weight = 1.0  # of its score without the score's mean over the first rollout
    config.rewards.overlong_cache = 0  # tokens of DAPO's soft overlong ramp; 0: off
    config.rewards.overlong_weight = 1.0  # of that ramp, which goes from 0 down to -1
    config.rewards.length_weight = 0.0  # of the number of tokens of an answer; below 0: a cost for each
    config.rewards.missing_eos_penalty = 0.0  # taken from the reward of an answer that is cut off
    config.rewards.truncated_scale = 1.0  # factor of the sum of a cut-off answer, with task.verify_truncated
    config.rewards.normalize = False  # sum sources centred and divided by their deviation in the group: GDPO
    config.rewards.shift = 0.0  # added to the sum
    config.rewards.scale = 1.0  # then multiplies it
    config.rewards.clip = ()  # least and largest reward after that; (): no bounds
    config.rewards.turn_gamma = 1.0  # the reward of turn k counts turn_gamma^(k - 1): docs/environments.md
    config.rewards.overlong_filter = False  # leave truncated answers out of the loss

    config.preference = ConfigDict()  # Pairs of answers, for objectives on pairs: see docs/preferences.md
    config.preference.file = ""  # JSONL of your own pairs (prompt, chosen, rejected); empty: made of the task
    config.preference.bad_lines = "raise"  # raise | skip (and count): lines of that file that are no pair
    config.preference.corruption = "any"  # replace | drop | repeat | swap | any: how a right answer becomes a wrong one
    config.preference.equal_share = 0.0  # share of pairs whose answers are equally correct, the shorter one chosen
    config.preference.label_noise = 0.0  # probability that chosen and rejected of a training pair are swapped
    config.preference.seed = 0  # of the pairs

    config.objective = ConfigDict()  # What is maximised: a recipe and its hyper-parameters, None for the recipe's own
    config.objective.name = "grpo"  # a recipe: see docs/objectives.md
    config.objective.aggregation = placeholder(str)
    config.objective.advantage = placeholder(str)
    config.objective.kl_coef = placeholder(float)
    config.objective.kl_estimator = placeholder(str)
    config.objective.teacher_coef = placeholder(float)
    config.objective.entropy_coef = placeholder(float)
    config.objective.correction = placeholder(str)
    config.objective.correction_cap = placeholder(float)
    config.objective.std = placeholder(str)
    config.objective.baseline = placeholder(str)
    config.objective.std_eps = placeholder(float)
    config.objective.clip_low = placeholder(float)
    config.objective.clip_high = placeholder(float)
    config.objective.dual_clip = placeholder(float)
    config.objective.reward_kl_coef = placeholder(float)
    config.objective.kl_target = placeholder(float)
    config.objective.kl_gain = placeholder(float)
    config.objective.gamma = placeholder(float)
    config.objective.lam = placeholder(float)
    config.objective.value_clip = placeholder(float)
    config.objective.value_coef = placeholder(float)
    config.objective.max_length = placeholder(int)
    config.objective.tau_pos = placeholder(float)
    config.objective.tau_neg = placeholder(float)
    config.objective.cap = placeholder(float)
    config.objective.floor = placeholder(float)
    config.objective.log_clip = placeholder(float)
    config.objective.gamma_min = placeholder(float)
    config.objective.center_rewards_coefficient = placeholder(float)
    config.objective.beta = placeholder(float)
    config.objective.label_smoothing = placeholder(float)
    config.objective.target_margin = placeholder(float)
    config.objective.nll_coef = placeholder(float)
    config.objective.phi_pos = placeholder(tuple)
    config.objective.phi_neg = placeholder(tuple)
    config.objective.tail = placeholder(float)
    config.objective.divergence = placeholder(str)
    config.objective.divergence_low = placeholder(float)
    config.objective.divergence_high = placeholder(float)
    config.objective.prefix_budget = placeholder(float)
    config.objective.weight_floor = placeholder(float)
    config.objective.delta = placeholder(float)
    config.objective.clip_cov_share = placeholder(float)
    config.objective.cov_low = placeholder(float)
    config.objective.cov_high = placeholder(float)
    config.objective.kl_cov_share = placeholder(float)
    config.objective.kl_cov_coef = placeholder(float)
    config.objective.step_coef = placeholder(float)
    config.objective.reference_kl = placeholder(float)
    config.objective.chosen_weight = placeholder(float)
    config.objective.rejected_weight = placeholder(float)
    config.objective.pass_k = placeholder(int)
    config.objective.pass_reward = placeholder(float)
    config.objective.length_alpha = placeholder(float)
    config.objective.teacher_weight = placeholder(float)
    config.objective.reward_weight = placeholder(float)
    config.objective.teacher_gamma = placeholder(float)
    config.objective.teacher_below = placeholder(float)
    for field, declared in objectives.fields(loaded=True).items():  # and those of recipes of your own
        config.objective[field] = placeholder(declared.kind)

    config.replay = ConfigDict()  # Routing replay, MoE only
    config.replay.mode = "off"  # off | R2 (of the scoring pass) | R3 (of the rollout)
    config.replay.what = "experts"  # experts (indices; gates follow the current router) | logits (indices and gates)

    config.updates = ConfigDict()  # N = minibatches x epochs optimizer steps per rollout
    config.updates.minibatches = 4  # into which a rollout is split
    config.updates.epochs = 1  # walks over the minibatches
    config.updates.micro_batch_rows = 0  # rows per forward and backward; 0: the whole minibatch
    config.updates.layout = "auto"  # auto (cheapest) | padded | packed (answers share rows) | shared (a prompt a group)
    config.updates.length_buckets = 1  # number of lengths to which padded rows are cut; each compiles once
    config.updates.shuffle = "answers"  # answers | groups: what stays whole when minibatches are drawn
    config.updates.aux_coef = 0.0  # weight of the load-balance loss; 0: off
    config.updates.router_bias_rate = 0.0  # step of a gate's bias towards an even load (supervised); 0: frozen
    config.updates.stop_at_kl = 0.0  # kl/old of an update beyond which a rollout's others are left out; 0: off

    config.optimizer = ConfigDict()  # AdamW
    config.optimizer.learning_rate = 1.5e-4
    config.optimizer.schedule = "constant"  # constant | linear | cosine: after the warm-up
    config.optimizer.warmup_steps = 0  # optimizer steps
    config.optimizer.final_fraction = 0.1  # final rate of linear and cosine, as a fraction
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.95
    config.optimizer.eps = 1e-8
    config.optimizer.weight_decay = 0.0  # on matrices; never on norms and embeddings
    config.optimizer.clip_norm = 1.0  # global gradient norm; 0: off
    config.optimizer.router_factor = 1.0  # learning-rate factor of the router; 0: frozen

    config.critic = ConfigDict()  # The value function, for PPO
    config.critic.kind = "none"  # none | head (on the policy) | separate (a model and an optimizer of its own)
    config.critic.learning_rate = 1e-3  # of a separate critic
    config.critic.warmup_steps = 0  # first rollouts in which the critic learns and the policy stays as it is

    config.teacher = ConfigDict()  # A frozen teacher to distil from: docs/distillation.md
    config.teacher.path = ""  # DIR, checkpoint or http://host:port with the policy's token ids; or A,B; empty: none
    config.teacher.weights = ()  # of several teachers' log-probs; (): all alike
    config.teacher.by = ""  # FIELD=VALUE,VALUE: field of a prompt's row that says which of several teachers scores it
    config.teacher.hint = "{answer} "  # text before the prompt where teacher.path=self: the policy that has the answer
    config.teacher.beta = 1.0  # of D: 0 forward KL(pi_T, pi), 1 reverse KL(pi, pi_T), between: Jensen-Shannon
    config.teacher.mesh_shape = ()  # mesh of devices that mesh.shape leaves, or if none of its; (): mesh.shape
    config.teacher.top_k = 0  # tokens of D, the teacher's likeliest, all others as one; 0: every token
    config.teacher.add_tail = True  # all others as one; False leaves them out, with top_k and beta=0

    config.evaluation = ConfigDict()  # On held-out prompts with fixed keys
    config.evaluation.every = 10  # steps; also before the first and after the last
    config.evaluation.prompts = 128  # held-out prompts
    config.evaluation.samples = 4  # answers per prompt, for pass@1 and pass@k
    config.evaluation.temperature = 1.0  # of these answers, whatever rollouts use; a greedy one is beside them
    config.evaluation.top_k = 0  # most tokens to draw them from; 0 keeps every one
    config.evaluation.top_p = 1.0  # draw from the fewest tokens with this much probability
    config.evaluation.min_p = 0.0  # drop tokens below this share of the largest probability

    config.checkpoint = ConfigDict()  # Checkpoints, from which a stopped run resumes
    config.checkpoint.every = 20  # steps, or later while one is written; also at the end or a signal
    config.checkpoint.keep = 2  # newest checkpoints that stay
    config.checkpoint.local_every = 0  # steps between others in DIR/local, of which the newest stays; 0: none
    config.checkpoint.best = ""  # metric whose best checkpoint stays too, for example eval/greedy; empty: none
    config.checkpoint.best_mode = "max"  # max (higher is better) | min (lower): of `best`
    config.checkpoint.early_stopping_patience = 0  # evaluations without a better `best` that end the run; 0: none

    config.log = ConfigDict()  # Records beside the metrics of every step
    config.log.samples = 4  # answers per step written to samples.jsonl
    config.log.diagnostics_every = 5  # steps between routing diagnostics with extra forwards; 0: never
    config.log.wandb = ""  # project of Weights & Biases to log to; empty: none
    config.log.profile = ()  # first and last step of a trace of jax.profiler in DIR/profile; (): none

    config.mesh = ConfigDict()  # How the devices are arranged
    config.mesh.shape = (1, 1, 1, 1)  # data, fsdp, expert, tensor[, context]; a size of -1 takes the remaining devices
    config.mesh.dcn_shape = ()  # sizes of these axes over slices that a slower network joins; (): all slices along data

    config.processes = ConfigDict()  # Several hosts, or one process per GPU: docs/several_processes.md
    config.processes.start_timeout_s = 300  # until all processes have joined
    config.processes.heartbeat_timeout_s = 60  # without a sign of life of one process, the others end

    if variant == "smoke":
        return smoke(config)
    if variant:
        raise ValueError(f"unknown variant {variant!r}; this config has 'smoke' or none")
    return config


def smoke(config: ConfigDict) -> ConfigDict:
    """The whole run, warm start to evaluation, in its smallest form."""
    config.steps = 3
    config.task.options = ConfigDict({"digits": 3, "train_size": 512, "test_size": 64})
    config.model.num_hidden_layers = 2
    config.model.hidden_size = 32
    config.model.head_dim = 8
    config.model.num_experts = 4
    config.model.moe_intermediate_size = 16
    config.warm_start.steps = 20
    config.rollout.prompts = 4
    config.rollout.group_size = 4
    config.updates.minibatches = 2
    config.evaluation.every = 2
    config.evaluation.prompts = 8
    config.evaluation.samples = 2
    config.checkpoint.every = 2
    config.log.diagnostics_every = 2
    return config
