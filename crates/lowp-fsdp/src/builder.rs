//! [`Builder`]: makes a [`ShardedModel`] of the parameters that its model states.

use std::error::Error;
use std::ops::Range;
use std::sync::Arc;

use lowp_comm::{MeshComm, or_abort};
use lowp_format::{BlockCuts, QuantizedTensor, Recipe, ShardTiles, Usage};
use lowp_gemm::Multiplies;
use lowp_kernels::{Backend, Source};
use lowp_optim::{
    Group, MatrixCut, OptimError, Optimizer, OptimizerBuilder, ParamId, ParamPlace, ParamSpec,
};
use lowp_shard::{
    GATHER_PLAN, GradParam, Init, Reshard, ShardError, ShardSpec, ShardedTensor, check_flat,
};

use crate::checkpoint::failed;
use crate::error::ModelError;
use crate::formats::check_formats;
use crate::gradients::Gradients;
use crate::memory::LayerMemory;
use crate::operand::{OperandPlan, PassState, RecipeOperands};
use crate::plain_vars::{PlainVars, VarRecipe, shape_of};
use crate::sharded_model::{ModelOptions, ShardedModel, Sharding};
use crate::sharded_weight::ShardedWeight;
use crate::spec::{LinearSpec, VarSpec};

/// A parameter that is registered with the optimizer, and gets its first values then.
pub(crate) struct NewParam<'a> {
    /// Linear layers come first, then variables.
    pub(crate) number: usize,
    pub(crate) name: &'a str,
    /// The optimizer's group.
    group: usize,
    init: &'a Init,
    cuts: &'a BlockCuts,
}

impl NewParam<'_> {
    /// In the order of whose tall matrix ranks have the elements.
    pub(crate) fn tiles(&self) -> &ShardTiles {
        &self.cuts.tiles
    }

    /// `elements` of the flattened tall matrix, as a new model of `seed` has them.
    fn initial(&self, seed: u64, elements: Range<usize>) -> Vec<f32> {
        let number = self.number as u64;
        let runs = self.tiles().runs(elements);
        let runs = runs.map(|run| self.init.rows(seed, number, run, 1));
        runs.reduce(|mut all, run| {
            all.extend(run);
            all
        })
        .unwrap_or_default()
    }

    /// `elements` of the flattened tall matrix, of what `read` gives of the flattened parameter.
    fn elements<E>(
        &self,
        elements: Range<usize>,
        read: impl FnOnce(Range<usize>) -> Result<Vec<f32>, E>,
    ) -> Result<Vec<f32>, E> {
        let bands = self.tiles().bands(&elements);
        let values = read(bands.clone())?;
        Ok(match self.tiles().are_in_order() {
            true => values,
            false => self.tiles().of_bands(&values, bands.start, elements),
        })
    }

    fn failed(&self, source: OptimError) -> ModelError {
        ModelError::Param {
            name: self.name.to_owned(),
            source: Box::new(source),
        }
    }
}

/// Gives elements of the flattened tall matrix of a parameter.
type ReadValues<'a> = &'a dyn Fn(&NewParam<'_>, Range<usize>) -> Result<Vec<f32>, OptimError>;

/// What building needs throughout.
pub(crate) struct Builder<'a, B: Backend> {
    pub(crate) backend: &'a B,
    pub(crate) mesh: &'a MeshComm<B>,
    pub(crate) options: ModelOptions,
}

impl<B: Multiplies, R: Recipe> ShardedModel<B, R> {
    /// Builds this rank's part: only its own elements are initialised and stored in f32, and they are those
    /// of an unsharded model. `recipe` says which recipe each weight lives in. Collective.
    ///
    /// # Errors
    /// A shape that the recipe cannot take or a product whose operands differ in format (with the layer's name), ranks
    /// that disagree, or no room.
    pub fn new(
        backend: &B,
        mesh: &MeshComm<B>,
        recipe: impl Fn(&LinearSpec) -> R,
        linears: &[LinearSpec],
        vars: &[VarSpec],
        options: ModelOptions,
    ) -> Result<Self, ModelError> {
        let builder = Builder {
            backend,
            mesh,
            options,
        };
        let init = |param: &NewParam<'_>, elements| Ok(param.initial(options.seed, elements));
        or_abort(&*mesh.world, builder.build(recipe, linears, vars, &init))
    }
}

/// What reads the first values of a parameter: `elements` of the flattened parameter of this name and shape.
pub trait FirstValues {
    /// # Errors
    /// They cannot be read.
    fn read(
        &self,
        name: &str,
        shape: &[usize],
        elements: Range<usize>,
    ) -> Result<Vec<f32>, Box<dyn Error + Send + Sync>>;
}

impl<B: Multiplies, R: Recipe> ShardedModel<B, R> {
    /// The same as [`ShardedModel::new`], with parameters that begin with the values that `first` reads: each rank reads its own elements,
    /// one parameter after the other. Collective.
    ///
    /// # Errors
    /// As there, and values that cannot be read.
    pub fn with_values(
        backend: &B,
        mesh: &MeshComm<B>,
        recipe: impl Fn(&LinearSpec) -> R,
        linears: &[LinearSpec],
        vars: &[VarSpec],
        options: ModelOptions,
        first: &dyn FirstValues,
    ) -> Result<Self, ModelError> {
        let builder = Builder {
            backend,
            mesh,
            options,
        };
        let values = |param: &NewParam<'_>, elements: Range<usize>| {
            let read = param.elements(elements, |elements| match linears.get(param.number) {
                Some(linear) => first.read(param.name, &[linear.rows, linear.cols], elements),
                None => {
                    let shape = &vars[param.number - linears.len()].shape;
                    first.read(param.name, shape, elements)
                }
            });
            read.map_err(|error| OptimError::Shard(failed(mesh, &error)))
        };
        or_abort(&*mesh.world, builder.build(recipe, linears, vars, &values))
    }
}

/// The optimizer that parameters are registered with, and the numbers of its groups.
struct NewOptimizer<B: Backend> {
    builder: OptimizerBuilder<B>,
    layers: usize,
    /// The group of variables with weight decay.
    decay: usize,
    /// The group of variables without weight decay.
    no_decay: usize,
}

/// The linear layers, in the order of their specs.
struct NewLayers<B: Backend, R: Recipe> {
    weights: Vec<(ParamId, Arc<ShardedWeight<B, R>>)>,
    operands: Vec<OperandPlan>,
    /// For each block its name, and what ranks must have in common of its gathers.
    gather_plans: Vec<[String; 2]>,
}

/// The variables, in the order of their specs.
struct NewVars<B: Backend> {
    shards: Vec<ShardedTensor<B, VarRecipe>>,
    /// The optimizer's parameters, and the elements that the ranks have of each.
    params: Vec<(ParamId, Vec<Range<usize>>)>,
}

/// The gradients, in the order of backward.
struct NewGradients<B: Backend> {
    gradients: Arc<Gradients<B>>,
    ids: Vec<ParamId>,
    /// The place of each variable in this order.
    vars: Vec<usize>,
}

impl<B: Multiplies> Builder<'_, B> {
    /// The model whose parameters begin with the elements that `values` gives.
    pub(crate) fn build<R: Recipe>(
        &self,
        recipe: impl Fn(&LinearSpec) -> R,
        linears: &[LinearSpec],
        vars: &[VarSpec],
        values: ReadValues<'_>,
    ) -> Result<ShardedModel<B, R>, ModelError> {
        let (backend, mesh, options) = (self.backend, self.mesh, self.options);
        let mut optimizer = self.optimizer(vars)?;
        let memory = LayerMemory::new(backend);
        let layers = self.layers(&mut optimizer, &memory, recipe, linears, values)?;
        let NewVars { shards, params } = self.vars(&mut optimizer, linears.len(), vars, values)?;
        let (mut plain_vars, var_plans) =
            PlainVars::new(backend, mesh, &memory, vars, shards, options.vars)?;
        // Ranks compare the plans of all blocks and of variables at once.
        let gather_plans = [layers.gather_plans, var_plans].concat();
        let compared = mesh.shard.control().each_equal(GATHER_PLAN, &gather_plans);
        compared.map_err(ShardError::from)?;
        let optimizer = optimizer.builder.build()?;
        let weights = layers.weights;
        let grads = self.gradients(&optimizer, linears, &weights, vars, &params)?;
        plain_vars.connect(&grads.gradients, &grads.vars)?;
        plain_vars.refresh()?;
        let pass = Arc::new(PassState::default());
        let operands = layers.operands.into_iter().map(|plan| {
            let (scales, world) = (optimizer.scales().clone(), mesh.world.clone());
            let operands =
                RecipeOperands::new(backend, plan, scales, pass.clone(), world, memory.clone());
            Arc::new(operands)
        });
        let operands = operands.collect();
        let sent_before = optimizer.flat_sent_bytes();
        Ok(ShardedModel {
            backend: backend.clone(),
            mesh: mesh.clone(),
            options,
            pass,
            memory,
            optimizer,
            weights,
            names: linears.iter().map(|spec| spec.name.clone()).collect(),
            operands,
            gradients: grads.gradients,
            grad_ids: grads.ids,
            micro_batches: 0,
            vars: plain_vars,
            var_ids: params.into_iter().map(|(id, _)| id).collect(),
            sent_before,
            recast: 0,
            rounded: 0,
            saving: None,
        })
    }

    /// The optimizer without parameters.
    fn optimizer(&self, vars: &[VarSpec]) -> Result<NewOptimizer<B>, ModelError> {
        let options = &self.options;
        let mut builder = OptimizerBuilder::new(self.mesh.world.clone())
            .on(self.backend)
            .offload(options.offload)
            .mesh(self.mesh.mesh)
            .seed(options.seed);
        if options.group.rule.is_of_matrices() {
            let products = self.backend.products().map_err(OptimError::from)?;
            builder = builder.products(products);
        }
        let of_vars = options.var_group.unwrap_or(options.group);
        if let Some(var) = vars.first()
            && of_vars.rule.is_of_matrices()
        {
            let (name, rule) = (var.name.clone(), of_vars.rule.name());
            return Err(ModelError::VarRule { name, rule });
        }
        let layers = builder.group(options.group);
        let decay = match options.var_group {
            Some(group) => builder.group(group),
            None => layers,
        };
        let no_decay = builder.group(Group {
            weight_decay: 0.0,
            ..of_vars
        });
        Ok(NewOptimizer {
            builder,
            layers,
            decay,
            no_decay,
        })
    }

    /// Registers the weights. Those of a block are gathered together. Collective.
    fn layers<R: Recipe>(
        &self,
        optimizer: &mut NewOptimizer<B>,
        memory: &Arc<LayerMemory<B>>,
        recipe: impl Fn(&LinearSpec) -> R,
        linears: &[LinearSpec],
        values: ReadValues<'_>,
    ) -> Result<NewLayers<B, R>, ModelError> {
        let (backend, mesh, options) = (self.backend, self.mesh, self.options);
        let reshard = match options.sharding {
            Sharding::Fsdp => Reshard::new(options.reshard_after_forward, &mesh.shard)?,
            Sharding::Zero1 => Reshard::No,
        };
        let cuts = self.cuts(&recipe, linears)?;
        let mut specs = linears.iter().zip(&cuts).enumerate();
        let (group, builder) = (optimizer.layers, &mut optimizer.builder);
        let (mut weights, mut operands, mut gather_plans) = (Vec::new(), Vec::new(), Vec::new());
        for block in linears.chunk_by(|a, b| a.block == b.block) {
            let (mut ids, mut shards) = (Vec::new(), Vec::new());
            for (number, (spec, cuts)) in specs.by_ref().take(block.len()) {
                let recipe = recipe(spec);
                check_formats(&recipe).map_err(|source| ModelError::Formats {
                    name: spec.name.clone(),
                    source: Box::new(source),
                })?;
                let param = NewParam {
                    number,
                    name: &spec.name,
                    group,
                    init: &spec.init,
                    cuts,
                };
                builder.scales().group(spec.amax_group);
                match options.sharding {
                    Sharding::Fsdp => {
                        let (id, shard) = self.shard(builder, &param, recipe, values)?;
                        ids.push(id);
                        shards.push(shard);
                    }
                    Sharding::Zero1 => {
                        let weight = self.whole(builder, memory, &param, recipe, values)?;
                        weights.push(weight);
                    }
                }
                let seed = options.seed;
                let operand = OperandPlan::new(&recipe, builder.scales(), seed, number as u64);
                operands.push(operand);
            }
            if !shards.is_empty() {
                let gathered = ShardedWeight::uncompared(backend, mesh, memory, shards, &reshard)?;
                weights.extend(ids.into_iter().zip(gathered.0.into_iter().map(Arc::new)));
                let name = format!("block {} ({})", block[0].block, block[0].name);
                gather_plans.push([name, gathered.1]);
            }
        }
        builder.scales().group(None);
        Ok(NewLayers {
            weights,
            operands,
            gather_plans,
        })
    }

    /// Registers the variables, whose numbers begin at `first`.
    fn vars(
        &self,
        optimizer: &mut NewOptimizer<B>,
        first: usize,
        vars: &[VarSpec],
        values: ReadValues<'_>,
    ) -> Result<NewVars<B>, ModelError> {
        let ranks = self.mesh.shard.world_size();
        let rule = self.options.var_group.unwrap_or(self.options.group).rule;
        let unit = self.options.state.unit(rule);
        let recipe = VarRecipe::default();
        let (mut shards, mut params) = (Vec::new(), Vec::new());
        for (number, spec) in (first..).zip(vars) {
            let cuts = BlockCuts::of_rows(&recipe, shape_of(spec)?, ranks, unit);
            let param = NewParam {
                number,
                name: &spec.name,
                group: match spec.decay {
                    true => optimizer.decay,
                    false => optimizer.no_decay,
                },
                init: &spec.init,
                cuts: &cuts.map_err(ShardError::from)?,
            };
            let (id, shard) = self.shard(&mut optimizer.builder, &param, recipe, values)?;
            params.push((id, shard.spec().all_elements()));
            shards.push(shard);
        }
        Ok(NewVars { shards, params })
    }

    /// Orders the gradients, makes their buckets, and connects weights with those. A head has its gradient first, the last layer the next,
    /// and other variables have theirs at the end. Collective.
    fn gradients<R: Recipe>(
        &self,
        optimizer: &Optimizer<B>,
        linears: &[LinearSpec],
        weights: &[(ParamId, Arc<ShardedWeight<B, R>>)],
        vars: &[VarSpec],
        var_params: &[(ParamId, Vec<Range<usize>>)],
    ) -> Result<NewGradients<B>, ModelError> {
        let (mut grads, mut ids) = (Vec::new(), Vec::new());
        let mut add = |name: &str, block, ranges: &[Range<usize>], id| {
            grads.push(GradParam {
                name: name.to_owned(),
                ranges: ranges.to_vec(),
                block,
                out: f32_buffer(optimizer.grad(id))?,
            });
            ids.push(id);
            Ok::<_, ModelError>(ids.len() - 1)
        };
        let mut var_places = vec![0; vars.len()];
        let (heads, others): (Vec<usize>, Vec<usize>) =
            (0..vars.len()).partition(|&number| vars[number].used.is_first_in_backward());
        for &number in &heads {
            let (id, ranges) = &var_params[number];
            var_places[number] = add(&vars[number].name, None, ranges, *id)?;
        }
        for ((id, weight), spec) in weights.iter().zip(linears).rev() {
            let block = self.options.vars.grad_block(spec.block);
            add(&spec.name, block, weight.element_ranges(), *id)?;
        }
        for number in others {
            let (id, ranges) = &var_params[number];
            var_places[number] = add(&vars[number].name, None, ranges, *id)?;
        }
        let gradients = Gradients::new(self.backend, self.mesh, grads, self.options.grads)?;
        let gradients = Arc::new(gradients);
        for ((_, weight), at) in weights.iter().rev().zip(heads.len()..) {
            weight.connect(&gradients, at)?;
        }
        Ok(NewGradients {
            gradients,
            ids,
            vars: var_places,
        })
    }

    /// Registers a parameter that ranks have shards of.
    fn shard<R: Recipe>(
        &self,
        optimizer: &mut OptimizerBuilder<B>,
        param: &NewParam<'_>,
        recipe: R,
        values: ReadValues<'_>,
    ) -> Result<(ParamId, ShardedTensor<B, R>), ModelError> {
        let mut register = || {
            let shard = ShardSpec::of_block(&recipe, param.cuts, self.mesh.shard.rank())?;
            let spec = self.spec(param, shard.elements(), values)?;
            let cut = MatrixCut {
                full: shard.full(),
                ranges: shard.all_elements(),
                tiles: Some(*param.tiles()),
            };
            let tensor = ShardedTensor::new(self.backend, recipe, shard)?;
            let id = optimizer.param(tensor.local(), spec)?;
            optimizer.matrix(id, cut)?;
            Ok((id, tensor))
        };
        register().map_err(|error| param.failed(error))
    }

    /// Registers a weight that every rank has whole, with slices of its masters.
    fn whole<R: Recipe>(
        &self,
        optimizer: &mut OptimizerBuilder<B>,
        memory: &Arc<LayerMemory<B>>,
        param: &NewParam<'_>,
        recipe: R,
        values: ReadValues<'_>,
    ) -> Result<(ParamId, Arc<ShardedWeight<B, R>>), ModelError> {
        let full = param.tiles().full();
        let mut register = || {
            check_flat(&recipe, Usage::BOTH)?;
            let tensor = QuantizedTensor::new(recipe, full, Usage::BOTH, |_, bytes| {
                Ok::<_, OptimError>(self.backend.alloc::<u8>(bytes)?)
            })?;
            let ranges = self.flat_ranges(&recipe, full)?;
            let own = ranges[self.mesh.shard.rank()].clone();
            let id = optimizer.flat_param(&tensor, own.start, self.spec(param, own, values)?)?;
            let cut = MatrixCut {
                full,
                ranges: ranges.clone(),
                tiles: None,
            };
            optimizer.matrix(id, cut)?;
            let weight = ShardedWeight::whole(self.backend, self.mesh, memory, tensor, ranges);
            Ok((id, Arc::new(weight)))
        };
        register().map_err(|error| param.failed(error))
    }

    /// What the optimizer gets of `elements`, this rank's.
    fn spec(
        &self,
        param: &NewParam<'_>,
        elements: Range<usize>,
        values: ReadValues<'_>,
    ) -> Result<ParamSpec, OptimError> {
        let place = ParamPlace {
            start: elements.start,
            tiles: Some(*param.tiles()),
        };
        let master = values(param, elements)?;
        Ok(ParamSpec {
            state: self.options.state,
            place,
            ..ParamSpec::new(param.name, param.group, master)
        })
    }
}

/// The reduce-scatter accumulates in fp32, so the optimizer's gradients are f32.
fn f32_buffer<B: Backend>(grad: &Source<B>) -> Result<B::Buffer<f32>, OptimError> {
    match grad {
        Source::F32(buffer) => Ok(buffer.clone()),
        Source::Bf16(_) => Err(OptimError::GradDtype {
            name: "a reduced gradient".to_owned(),
            expected: "f32",
        }),
    }
}
