//! [`Config`]: how a network is trained. Its JSON is what result files and checkpoints say of a run.

use lowp_comm::{GradWire, Mesh};
use lowp_format::ReshardAfterForward;
use lowp_format::spelling::Variant;
use lowp_fsdp::{LinearSpec, Passes, Sharding, VarSpec};
use lowp_optim::{Decay, Group, Schedule, StateDtypes};
use lowp_shard::Reduction;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

use crate::defaults;
use crate::error::{TrainError, within_steps};
use crate::forms::{self, written};
use crate::network::Model;
use crate::optimizer::Optimizer;
use crate::run::Run;

/// Most steps of one run.
pub(crate) const MAX_STEPS: usize = 10_000_000;
/// Most sequences of a batch: 16 for each of the most ranks.
pub const MAX_BATCH: usize = 16 * MAX_RANKS;
/// Most micro-batches of a step and batches of an evaluation.
const MAX_PARTS: usize = 1 << 16;
/// Most ranks of a mesh.
const MAX_RANKS: usize = 1 << 20;
/// Most seeds of one configuration.
const MAX_SEEDS: usize = 1000;

/// How a network is trained; the same on all ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config<M> {
    /// The sizes that define the network.
    #[serde(flatten)]
    pub model: M,
    /// Sequences per step over all ranks, or examples where the data are no text.
    pub batch: usize,
    /// Micro-batches that the sequences of a step are cut into; their gradients add up.
    pub accumulate: usize,
    /// Whether gradients are reduced in every micro-batch: else they are added on each rank, in memory for all of them, and reduced once
    /// per step. Left out of JSON if not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reduce_every_micro_batch: bool,
    /// Whether blocks run forward again in backward. The network does it; byte counts depend on it.
    pub recompute: bool,
    /// Names of the linear layers that stay in bf16, whatever the recipe.
    pub kept_in_bf16: Vec<String>,
    /// Names of linear layers that have one amax, by group.
    pub amax_groups: Vec<Vec<String>>,
    /// Steps at the end whose forward products run in bf16: the precision tail.
    pub tail_steps: usize,
    /// Optimizer steps of the run, those before a resume included.
    pub steps: usize,
    /// Seed of initial weights, batches and stochastic rounding.
    pub seed: u64,
    /// Number of seeds that runs are repeated for, from `seed` up ([`Config::each_seed`]).
    pub seeds: usize,
    /// Replicas x shards. JSON: `[replicas, shards]`.
    #[serde(with = "forms::mesh")]
    pub mesh: Mesh,
    /// What each rank has of the linear layers between steps. JSON: `"fsdp"` or `"zero1"`.
    #[serde(with = "forms::sharding")]
    pub sharding: Sharding,
    /// What happens to gathered weights after the forward pass. JSON: a boolean, or a number of ranks.
    #[serde(with = "forms::reshard")]
    pub reshard_after_forward: ReshardAfterForward,
    /// How gradients travel. JSON: `"f32"` or `"bf16"`.
    #[serde(with = "forms::grad_wire")]
    pub grad_wire: GradWire,
    /// What updates parameters; left out of JSON if it is AdamW.
    #[serde(default, skip_serializing_if = "Optimizer::is_default")]
    pub optimizer: Optimizer,
    /// The dtypes of the states that it has. JSON: `"exp_avg=bf16"`; left out if all are f32.
    #[serde(
        default,
        with = "forms::state",
        skip_serializing_if = "forms::state::is_f32"
    )]
    pub optimizer_state: StateDtypes,
    /// Whether masters and states are page-locked memory of the host, which the device of a rank reads and writes in each step. It changes no
    /// result. Left out of JSON if not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub offload_optimizer: bool,
    /// Highest learning rate: that after warm-up.
    pub lr: f32,
    /// Highest learning rate of variables where the optimizer is one of matrices, and AdamW updates them.
    #[serde(default = "defaults::var_lr")]
    pub var_lr: f32,
    /// Steps of linear warm-up.
    pub warmup: u64,
    /// How the learning rate falls after warm-up. JSON: `"linear"`, or the number of last steps in which it falls; left out of a cosine.
    #[serde(
        default,
        with = "forms::decay",
        skip_serializing_if = "forms::decay::is_cosine"
    )]
    pub schedule: Decay,
    /// Learning rate of the last step, as a fraction of the highest.
    pub final_lr: f32,
    /// Decay of the second moment of AdamW, and of `exp_avg` of Lion. SGD does not read it.
    #[serde(default = "defaults::beta2")]
    pub beta2: f32,
    /// Weight decay of all matrices but those that are named next: decoupled, but for SGD, which adds it to gradients.
    pub weight_decay: f32,
    /// Names of parameters that stay in f32 and do not decay, beside norms.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub no_decay: Vec<String>,
    /// Global gradient norm above which gradients are scaled down.
    pub clip: f32,
    /// Coefficient of the z-loss: the gradient is that of the cross entropy plus this times the squared logarithm of the softmax's sum,
    /// while losses are the cross entropy alone. The network does it, and must be made with it ([`Network::z_loss`](crate::Network::z_loss)).
    #[serde(default, skip_serializing_if = "defaults::is_zero")]
    pub z_loss: f32,
    /// Batches of the validation split that a loss on it is averaged over.
    pub eval_batches: usize,
    /// Evaluate after every so many steps, and after the last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eval_every: Option<usize>,
}

impl<M> Config<M> {
    /// 200 steps of 16 sequences on one rank, with AdamW: `lr` 3e-3 after 20 steps of warm-up, then a cosine down to a tenth.
    pub fn new(model: M) -> Self {
        Self {
            model,
            batch: 16,
            accumulate: 1,
            reduce_every_micro_batch: false,
            recompute: false,
            kept_in_bf16: Vec::new(),
            amax_groups: Vec::new(),
            tail_steps: 0,
            steps: 200,
            seed: 0,
            seeds: 1,
            mesh: Mesh::sharded(1),
            sharding: Sharding::Fsdp,
            reshard_after_forward: ReshardAfterForward::Yes,
            grad_wire: GradWire::F32,
            optimizer: Optimizer::default(),
            optimizer_state: StateDtypes::default(),
            offload_optimizer: false,
            lr: 3e-3,
            var_lr: defaults::var_lr(),
            warmup: 20,
            schedule: Decay::Cosine,
            final_lr: 0.1,
            beta2: defaults::beta2(),
            weight_decay: 0.1,
            no_decay: Vec::new(),
            clip: 1.0,
            z_loss: 0.0,
            eval_batches: 8,
            eval_every: None,
        }
    }

    /// Checks the numbers by themselves and against each other.
    ///
    /// # Errors
    /// An input error ([`TrainError::is_input`]) with the field, and a value that would work.
    pub fn check(&self) -> Result<(), TrainError> {
        let counts = [
            ("steps", self.steps, MAX_STEPS),
            ("accumulate", self.accumulate, MAX_PARTS),
            ("seeds", self.seeds, MAX_SEEDS),
            ("batch", self.batch, MAX_BATCH),
            ("eval_batches", self.eval_batches, MAX_PARTS),
        ];
        for (field, value, most) in counts {
            if !(1..=most).contains(&value) {
                return Err(TrainError::Range { field, value, most });
            }
        }
        within_steps("eval_every", self.eval_every, self.steps)?;
        let Mesh { replicate, shard } = self.mesh;
        let (batch, accumulate) = (self.batch, self.accumulate);
        let Some(ranks) = replicate
            .checked_mul(shard)
            .filter(|ranks| (1..=MAX_RANKS).contains(ranks))
        else {
            return Err(TrainError::Mesh {
                replicate,
                shard,
                most: MAX_RANKS,
            });
        };
        if batch < ranks {
            return Err(TrainError::FewSequences { batch, ranks });
        }
        if batch / ranks < accumulate {
            return Err(TrainError::ManyMicroBatches {
                batch,
                ranks,
                accumulate,
            });
        }
        if self.warmup > self.steps as u64 {
            let (warmup, steps) = (self.warmup, self.steps);
            return Err(TrainError::LongWarmup { warmup, steps });
        }
        if self.tail_steps > self.steps {
            let (tail_steps, steps) = (self.tail_steps, self.steps);
            return Err(TrainError::LongTail { tail_steps, steps });
        }
        if let Decay::Stable { decay } = self.schedule
            && decay > self.steps as u64 - self.warmup
        {
            return Err(TrainError::LongDecay {
                decay_steps: decay,
                warmup: self.warmup,
                steps: self.steps,
            });
        }
        let others = (self.seeds as u64).saturating_sub(1);
        if self.seed.checked_add(others).is_none() {
            let (seed, seeds) = (self.seed, self.seeds);
            return Err(TrainError::Seeds { seed, seeds });
        }
        self.reshard_after_forward.among(self.mesh.shard)?;
        self.optimizer.check_states(self.optimizer_state)?;
        for (field, value, zero) in [
            ("final_lr", self.final_lr, true),
            ("lr", self.lr, false),
            ("var_lr", self.var_lr, false),
            ("beta2", self.beta2, true),
            ("weight_decay", self.weight_decay, true),
            ("clip", self.clip, false),
            ("z_loss", self.z_loss, true),
        ] {
            if !value.is_finite() || value < 0.0 || (value == 0.0 && !zero) {
                let value = f64::from(value);
                return Err(TrainError::Number { field, value, zero });
            }
        }
        if self.beta2 >= 1.0 {
            return Err(TrainError::Beta2 { beta2: self.beta2 });
        }
        match self.final_lr > 1.0 {
            true => Err(TrainError::RisingRate {
                final_lr: self.final_lr,
            }),
            false => Ok(()),
        }
    }

    /// The last of the seeds.
    pub fn last_seed(&self) -> u64 {
        self.seed + (self.seeds as u64).saturating_sub(1)
    }

    /// How often layers run in a step.
    pub fn passes(&self) -> Passes {
        Passes {
            micro_batches: self.accumulate,
            recompute: self.recompute,
        }
    }

    /// Whether each rank keeps its full gradients from micro-batch to micro-batch.
    pub fn keeps_gradients(&self) -> bool {
        self.accumulate > 1 && !self.reduce_every_micro_batch
    }

    /// What becomes of the gradients of micro-batch `micro` of a step.
    pub fn reduction(&self, micro: usize) -> Reduction {
        if micro + 1 == self.accumulate {
            Reduction::Finish
        } else if self.reduce_every_micro_batch {
            Reduction::Scatter
        } else {
            Reduction::Keep
        }
    }

    /// The learning rate of each step, as a factor of `lr`.
    pub fn schedule(&self) -> Schedule {
        Schedule {
            warmup: self.warmup,
            total: self.steps as u64,
            floor: self.final_lr,
            decay: self.schedule,
        }
    }

    /// The rule and the hyperparameters of the optimizer.
    pub fn group(&self) -> Group {
        let defaults = self.optimizer.defaults();
        Group {
            lr: self.lr,
            betas: (defaults.betas.0, self.beta2),
            weight_decay: self.weight_decay,
            ..defaults
        }
    }

    /// Those of variables, where they are not those of layers.
    pub fn var_group(&self) -> Option<Group> {
        let group = Group {
            lr: self.var_lr,
            betas: (Group::default().betas.0, self.beta2),
            weight_decay: self.weight_decay,
            ..Group::default()
        };
        self.optimizer.rule().is_of_matrices().then_some(group)
    }
}

impl<M: Model> Config<M> {
    /// The configuration of each seed, in order.
    pub fn each_seed(&self) -> impl Iterator<Item = Self> {
        (self.seed..=self.last_seed()).map(|seed| Self {
            seed,
            ..self.clone()
        })
    }

    /// Checks the names of layers, and that the model has a form in JSON.
    ///
    /// # Errors
    /// A name that is none, or is there twice; a group of one; a model that is no object of fields of its own.
    pub(crate) fn check_model(&self) -> Result<(), TrainError> {
        let linears = self.model.linears();
        let kept = [("kept_in_bf16", self.kept_in_bf16.iter().collect::<Vec<_>>())];
        let grouped = [("amax_groups", self.amax_groups.iter().flatten().collect())];
        for (field, names) in kept.into_iter().chain(grouped) {
            let wrong = |name: &str, why| TrainError::LayerName {
                field,
                name: name.to_owned(),
                why,
            };
            let mut seen = BTreeSet::new();
            for name in names {
                if !linears.iter().any(|linear| linear.name == *name) {
                    return Err(wrong(name, "is no linear layer of the model"));
                }
                if !seen.insert(name) {
                    return Err(wrong(name, "is there twice; leave one of them out"));
                }
            }
        }
        let vars = self.model.vars();
        let var = |name: &&String| !vars.iter().any(|var| var.name == **name);
        if let Some(name) = self.no_decay.iter().find(var) {
            return Err(TrainError::LayerName {
                field: "no_decay",
                name: name.clone(),
                why: "is no parameter of the model that stays in f32",
            });
        }
        match self.amax_groups.iter().find(|group| group.len() < 2) {
            Some(group) => Err(TrainError::LayerName {
                field: "amax_groups",
                name: group.concat(),
                why: "is a group by itself; a group has two layers or more",
            }),
            None => self.check_model_form(),
        }
    }

    /// Checks that the JSON of the configuration says all of its model.
    fn check_model_form(&self) -> Result<(), TrainError> {
        #[derive(Serialize)]
        struct NoModel {}
        let own = written(&Config::new(NoModel {}))?;
        let model = written(&self.model)?;
        let Some(fields) = model.as_object() else {
            let why = format!("is {model}, and its JSON must be an object with named fields");
            return Err(TrainError::ModelForm(why));
        };
        let mut fields = fields.keys();
        match fields.find(|field| own.get(field.as_str()).is_some()) {
            Some(field) => Err(TrainError::ModelForm(format!(
                "has a field `{field}`, as `Config` has; give it another name"
            ))),
            None => Ok(()),
        }
    }

    /// The linear layers, with the groups that have one amax.
    pub fn linears(&self) -> Vec<LinearSpec> {
        let mut linears = self.model.linears();
        for linear in &mut linears {
            let mut groups = self.amax_groups.iter();
            linear.amax_group = groups.position(|group| group.contains(&linear.name));
        }
        linears
    }

    /// The parameters that stay in f32, with those that do not decay.
    pub fn vars(&self) -> Vec<VarSpec> {
        let mut vars = self.model.vars();
        for var in &mut vars {
            var.decay &= !self.no_decay.contains(&var.name);
        }
        vars
    }

    /// The recipe of `linear` in a run, of a model of so many `blocks`; in the `tail`, with forward products in bf16.
    pub fn recipe_of(&self, run: &Run, linear: &LinearSpec, blocks: usize, tail: bool) -> Variant {
        let own = match self.kept_in_bf16.contains(&linear.name) {
            true => run.recipe.in_bf16(),
            false => run.recipe.of_block(linear.block, blocks),
        };
        if tail { own.with_bf16_forward() } else { own }
    }
}

/// The number of blocks that `linears` are in.
pub(crate) fn blocks(linears: &[LinearSpec]) -> usize {
    let blocks = linears.iter().map(|linear| linear.block + 1);
    blocks.max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowp_transformer::{Arch, GptConfig, Llama};
    use std::collections::BTreeMap;

    /// What result files and checkpoints say of a run is its configuration again.
    #[test]
    fn json_is_the_configuration() {
        let arch = Arch::Llama(Llama::new(2));
        for policy in ["true", "false", "2"] {
            let config = Config {
                mesh: Mesh {
                    replicate: 3,
                    shard: 4,
                },
                sharding: Sharding::Zero1,
                reshard_after_forward: policy.parse().expect("a policy"),
                grad_wire: GradWire::Bf16,
                kept_in_bf16: vec!["a".to_owned()],
                amax_groups: vec![vec!["b".to_owned(), "c".to_owned()]],
                optimizer: Optimizer::Lion,
                lr: 0.1,
                beta2: 0.999,
                z_loss: 1e-4,
                eval_every: Some(10),
                ..Config::new(GptConfig {
                    arch,
                    ..GptConfig::default()
                })
            };
            let json = serde_json::to_string(&config).expect("JSON");
            for part in [
                "\"arch\":\"llama\",\"kv_heads\":2,",
                "\"mesh\":[3,4],\"sharding\":\"zero1\",",
                &format!(
                    "\"reshard_after_forward\":{policy},\"grad_wire\":\"bf16\",\"optimizer\":\"lion\",\"lr\":0.1,"
                ),
            ] {
                assert!(json.contains(part), "{json}");
            }
            let again: Config<GptConfig> = serde_json::from_str(&json).expect("a configuration");
            assert_eq!(again, config);
        }
        let wrong = serde_json::from_str::<GptConfig>(
            "{\"dim\":1,\"layers\":1,\"heads\":1,\"seq\":1,\"vocab\":256,\"arch\":\"gpt\",\"kv_heads\":1}",
        );
        assert!(wrong.is_err());
    }

    /// Errors name the field, and are of the input.
    #[test]
    fn what_cannot_be_is_named() {
        type Change = fn(&mut Config<GptConfig>);
        let changes: [(Change, &str); 20] = [
            (
                |c| c.mesh = Mesh::sharded(0),
                "`mesh` 1x0: both numbers must be",
            ),
            (
                |c| c.mesh.replicate = usize::MAX,
                "both numbers must be at least 1, and their product at most",
            ),
            (|c| c.steps = 0, "`steps` must be from 1 to 10000000, not 0"),
            (|c| c.batch = 1, "choose `batch` 4 or more, or fewer ranks"),
            (|c| c.accumulate = 9, "choose `batch` 36 or more"),
            (|c| c.warmup = 201, "`warmup` 201 is longer than the 200"),
            (|c| c.tail_steps = 201, "`tail_steps` 201 is more"),
            (
                |c| c.schedule = Decay::Stable { decay: 201 },
                "`decay_steps` 201 after `warmup` 20 is more than the 200 steps; choose 180 or fewer",
            ),
            (|c| c.final_lr = 1.5, "`final_lr` 1.5 is above 1"),
            (|c| c.lr = 0.0, "`lr` 0.0: expected a positive number"),
            (|c| c.clip = f32::NAN, "`clip` NaN: expected a positive"),
            (|c| c.beta2 = 1.0, "`beta2` 1.0 is not below 1"),
            (|c| c.weight_decay = -1.0, "`weight_decay` -1.0: expected 0"),
            (|c| (c.seed, c.seeds) = (u64::MAX, 2), "beyond 64 bits"),
            (|c| c.eval_batches = 0, "`eval_batches` must be from 1"),
            (
                |c| c.eval_every = Some(201),
                "`eval_every` must be from 1 to 200, the number of steps, not 201",
            ),
            (|c| c.z_loss = -0.1, "`z_loss` -0.1"),
            (
                |c| {
                    c.optimizer = Optimizer::Sgd;
                    c.optimizer_state = "exp_avg=bf16".parse().expect("dtypes");
                },
                "`optimizer_state` exp_avg=bf16: sgd has no exp_avg; it keeps momentum_buffer",
            ),
            (
                |c| {
                    c.optimizer = Optimizer::Muon;
                    c.optimizer_state = "momentum_buffer=bf16".parse().expect("dtypes");
                },
                "adamw updates embeddings, heads, norms and biases next to `optimizer` muon, whose own state stays in f32",
            ),
            (
                |c| c.reshard_after_forward = ReshardAfterForward::Group(3),
                "4 ranks cannot be split into groups of 3",
            ),
        ];
        for (change, expected) in changes {
            let mut config = Config::new(GptConfig::default());
            config.mesh = Mesh::sharded(4);
            config.check().expect("a configuration");
            change(&mut config);
            let error = config.check().expect_err(expected);
            assert!(error.is_input(), "{error}");
            assert!(error.to_string().contains(expected), "{error}");
        }
    }

    /// A model of one layer, of which `self.0` is written.
    #[derive(Clone, Debug, Serialize)]
    #[serde(transparent)]
    struct Written<T>(T);

    impl<T: Clone + std::fmt::Debug + Serialize + Send + Sync> Model for Written<T> {
        fn linears(&self) -> Vec<LinearSpec> {
            vec![LinearSpec::new("up", 4, 4, lowp_shard::Init::Constant(0.0))]
        }
    }

    /// Layers that are not there, and models whose fields are not all in the configuration's JSON.
    #[test]
    fn what_a_model_cannot_have_is_named() {
        let sizes = || Written(BTreeMap::from([("width", 4)]));
        type Change = fn(&mut Config<Written<BTreeMap<&'static str, i32>>>);
        Config::new(sizes()).check_model().expect("a model");
        let changes: [(Change, &str); 5] = [
            (
                |c| c.kept_in_bf16 = vec!["no".into()],
                "`kept_in_bf16`: 'no' is no linear",
            ),
            (
                |c| c.kept_in_bf16 = vec!["up".into(); 2],
                "'up' is there twice",
            ),
            (
                |c| c.amax_groups = vec![vec!["up".into()]],
                "'up' is a group by itself",
            ),
            (|c| c.amax_groups = vec![vec![]], "is a group by itself"),
            (
                |c| c.model.0 = BTreeMap::from([("seed", 1)]),
                "the model has a field `seed`",
            ),
        ];
        for (change, expected) in changes {
            let mut config = Config::new(sizes());
            change(&mut config);
            let error = config.check_model().expect_err(expected);
            assert!(
                error.is_input() && error.to_string().contains(expected),
                "{error}"
            );
        }
        let error = Config::new(Written(3))
            .check_model()
            .expect_err("no object");
        assert!(
            error
                .to_string()
                .starts_with("the model is 3, and its JSON")
        );
    }
}
