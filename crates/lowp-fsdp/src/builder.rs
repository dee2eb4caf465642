//! [`Builder`]: makes a [`ShardedModel`] of the parameters that its model states.

use std::error::Error;
use std::ops::Range;
use std::sync::Arc;

use lowp_comm::{MeshComm, or_abort};
use lowp_format::{
    BlockCuts, FormatError, PlainF32, QuantizedTensor, Recipe, Role, Shape, ShardTiles, Usage,
    block_cuts, lcm,
};
use lowp_gemm::Multiplies;
use lowp_kernels::{Backend, MasterDtype, Rule, Source};
use lowp_optim::{
    Group, MatrixCut, OptimError, OptimizerBuilder, ParamId, ParamPlace, ParamSpec, StateDtypes,
};
use lowp_shard::{
    FlatShard, GATHER_PLAN, GradParam, Init, Reshard, ShardError, ShardSpec, ShardedTensor,
    check_flat,
};

use crate::checkpoint::failed;
use crate::error::ModelError;
use crate::formats::check_formats;
use crate::gradients::Gradients;
use crate::memory::LayerMemory;
use crate::operand::{OperandPlan, PassState, RecipeOperands};
use crate::plain_vars::{PlainVars, shape_of};
use crate::sharded_model::{ModelOptions, ShardedModel, Sharding};
use crate::sharded_weight::ShardedWeight;
use crate::spec::{LinearSpec, VarSpec};

/// A parameter that gets its first values.
pub(crate) struct Begun<'a> {
    /// Its number: linear layers come first, then variables.
    pub(crate) number: usize,
    pub(crate) init: &'a Init,
    /// In the order of whose tall matrix ranks have its elements.
    pub(crate) tiles: ShardTiles,
}

impl Begun<'_> {
    /// `elements` of the flattened tall matrix, as a new model of `seed` has them.
    pub(crate) fn initial(&self, seed: u64, elements: Range<usize>) -> Vec<f32> {
        let number = self.number as u64;
        let runs = self.tiles.runs(elements);
        let runs = runs.map(|run| self.init.rows(seed, number, run, 1));
        runs.reduce(|mut all, run| {
            all.extend(run);
            all
        })
        .unwrap_or_default()
    }

    /// `elements` of the flattened tall matrix, of what `read` gives of the flattened parameter.
    pub(crate) fn elements<E>(
        &self,
        elements: Range<usize>,
        read: impl FnOnce(Range<usize>) -> Result<Vec<f32>, E>,
    ) -> Result<Vec<f32>, E> {
        let bands = self.tiles.bands(&elements);
        let values = read(bands.clone())?;
        Ok(match self.tiles.are_in_order() {
            true => values,
            false => self.tiles.of_bands(&values, bands.start, elements),
        })
    }
}

/// A full weight, and the slices that the ranks have of its masters.
type Whole<B, R> = (
    QuantizedTensor<<B as Backend>::Buffer<u8>, R>,
    Vec<Range<usize>>,
);

/// The weights of a block, and where their cuts are among those of all weights.
type CutBlock<R> = (Vec<(R, Shape)>, Range<usize>);

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
        let init = |param: &Begun<'_>, elements| Ok(param.initial(options.seed, elements));
        or_abort(&*mesh.world, builder.build(recipe, linears, vars, init))
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
        (backend, mesh): (&B, &MeshComm<B>),
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
        let values = |param: &Begun<'_>, elements: Range<usize>| {
            let read = param.elements(elements, |elements| match linears.get(param.number) {
                Some(linear) => first.read(&linear.name, &[linear.rows, linear.cols], elements),
                None => {
                    let var = &vars[param.number - linears.len()];
                    first.read(&var.name, &var.shape, elements)
                }
            });
            read.map_err(|error| OptimError::Shard(failed(mesh, &error)))
        };
        or_abort(&*mesh.world, builder.build(recipe, linears, vars, values))
    }
}

impl<B: Multiplies> Builder<'_, B> {
    /// The model whose parameters begin with the elements that `values` gives.
    pub(crate) fn build<R: Recipe>(
        &self,
        recipe: impl Fn(&LinearSpec) -> R,
        linears: &[LinearSpec],
        vars: &[VarSpec],
        values: impl Fn(&Begun<'_>, Range<usize>) -> Result<Vec<f32>, OptimError>,
    ) -> Result<ShardedModel<B, R>, ModelError> {
        let Self {
            backend,
            mesh,
            options,
        } = *self;
        let mut optimizer = OptimizerBuilder::new(mesh.world.clone())
            .on(backend)
            .offload(options.offload)
            .mesh(mesh.mesh)
            .seed(options.seed);
        if options.group.rule.is_of_matrices() {
            let products = backend.products().map_err(OptimError::from)?;
            optimizer = optimizer.products(products);
        }
        let of_vars = options.var_group.unwrap_or(options.group);
        if let Some(var) = vars.first()
            && of_vars.rule.is_of_matrices()
        {
            let (name, rule) = (var.name.clone(), of_vars.rule.name());
            return Err(ModelError::VarRule { name, rule });
        }
        let layers = optimizer.group(options.group);
        let decay = match options.var_group {
            Some(group) => optimizer.group(group),
            None => layers,
        };
        let no_decay = optimizer.group(Group {
            weight_decay: 0.0,
            ..of_vars
        });
        let memory = LayerMemory::new(backend);
        let reshard = match options.sharding {
            Sharding::Fsdp => Reshard::new(options.reshard_after_forward, &mesh.shard)?,
            Sharding::Zero1 => Reshard::No,
        };
        let cuts = self.cuts(&recipe, linears)?;
        let (mut ids, mut weights, mut shards) = (Vec::new(), Vec::new(), Vec::new());
        let mut plans = Vec::new();
        for (number, spec) in linears.iter().enumerate() {
            let (recipe, shape) = (recipe(spec), Shape::new(spec.rows, spec.cols));
            check_formats(&recipe).map_err(|source| ModelError::Formats {
                name: spec.name.clone(),
                source: Box::new(source),
            })?;
            let cuts = &cuts[number];
            let begun = Begun {
                number,
                init: &spec.init,
                tiles: cuts.tiles,
            };
            let init = |elements: Range<usize>| -> Result<ParamSpec, OptimError> {
                let place = ParamPlace {
                    start: elements.start,
                    tiles: Some(begun.tiles),
                };
                let master = values(&begun, elements)?;
                Ok(ParamSpec {
                    state: options.state,
                    place,
                    ..ParamSpec::new(&spec.name, layers, master)
                })
            };
            let failed = |source| ModelError::Param {
                name: spec.name.clone(),
                source: Box::new(source),
            };
            optimizer.scales().group(spec.amax_group);
            match options.sharding {
                Sharding::Fsdp => {
                    let made = self.param(recipe, cuts, &mut optimizer, |s| init(s.elements()));
                    let (tensor, id) = made.map_err(failed)?;
                    shards.push(tensor);
                    ids.push(id);
                }
                Sharding::Zero1 => {
                    let made = self.flat_param(recipe, shape, &mut optimizer, init);
                    let ((tensor, ranges), id) = made.map_err(failed)?;
                    let weight = ShardedWeight::whole(backend, mesh, &memory, tensor, ranges);
                    weights.push(weight);
                    ids.push(id);
                }
            }
            plans.push(OperandPlan::new(
                &recipe,
                optimizer.scales(),
                options.seed,
                number as u64,
            ));
        }
        optimizer.scales().group(None);
        // Weights of a block are gathered together; ranks compare the plans of all blocks and of variables at once.
        let mut shards = shards.into_iter();
        let mut gather_plans = Vec::new();
        for block in linears.chunk_by(|a, b| a.block == b.block) {
            let tensors: Vec<_> = shards.by_ref().take(block.len()).collect();
            if !tensors.is_empty() {
                let made = ShardedWeight::uncompared(backend, mesh, &memory, tensors, &reshard)?;
                weights.extend(made.0);
                let name = format!("block {} ({})", block[0].block, block[0].name);
                gather_plans.push([name, made.1]);
            }
        }
        let weights = ids.into_iter().zip(weights.into_iter().map(Arc::new));
        let weights: Vec<_> = weights.collect();
        let (mut own_vars, mut var_shards) = (Vec::new(), Vec::new());
        for (number, spec) in (linears.len()..).zip(vars) {
            let shape = shape_of(spec)?;
            let group = if spec.decay { decay } else { no_decay };
            let param = PlainF32::default();
            let ranks = mesh.shard.world_size();
            let rule = options.var_group.unwrap_or(options.group).rule;
            let unit = options.state.unit(rule);
            let cuts = BlockCuts::of_rows(&param, shape, ranks, unit).map_err(ShardError::from)?;
            let begun = Begun {
                number,
                init: &spec.init,
                tiles: cuts.tiles,
            };
            let (tensor, id) = self
                .param(param, &cuts, &mut optimizer, |s| {
                    let place = ParamPlace {
                        start: s.elements().start,
                        tiles: Some(begun.tiles),
                    };
                    let init = values(&begun, s.elements())?;
                    Ok(ParamSpec {
                        state: options.state,
                        place,
                        ..ParamSpec::new(&spec.name, group, init)
                    })
                })
                .map_err(|source| ModelError::Param {
                    name: spec.name.clone(),
                    source: Box::new(source),
                })?;
            own_vars.push((id, tensor.spec().all_elements()));
            var_shards.push(tensor);
        }
        let on = (backend, mesh, &*memory);
        let (mut plain_vars, plans_of_vars) = PlainVars::new(on, vars, var_shards, options.vars)?;
        gather_plans.extend(plans_of_vars);
        let control = mesh.shard.control();
        let compared = control.each_equal(GATHER_PLAN, &gather_plans);
        compared.map_err(ShardError::from)?;
        let optimizer = optimizer.build()?;
        let param = |name: &str, block, ranges: &[Range<usize>], id| -> Result<_, ModelError> {
            Ok(GradParam {
                name: name.to_owned(),
                ranges: ranges.to_vec(),
                block,
                out: f32_buffer(optimizer.grad(id))?,
            })
        };
        // A head has its gradient first, the last layer the next, and other variables have theirs at the end.
        let mut grads = Vec::new();
        let mut grad_ids = Vec::new();
        let numbers = 0..vars.len();
        let (heads, others): (Vec<usize>, Vec<usize>) =
            numbers.partition(|&number| vars[number].used.is_first_in_backward());
        let mut var_grads = vec![0; vars.len()];
        let mut add_var = |number: usize, grads: &mut Vec<_>, grad_ids: &mut Vec<_>| {
            let (id, ranges) = &own_vars[number];
            var_grads[number] = grads.len();
            grads.push(param(&vars[number].name, None, ranges, *id)?);
            grad_ids.push(*id);
            Ok::<_, ModelError>(())
        };
        for &head in &heads {
            add_var(head, &mut grads, &mut grad_ids)?;
        }
        for ((id, weight), spec) in weights.iter().zip(linears).rev() {
            let block = options.vars.grad_block(spec.block);
            grads.push(param(&spec.name, block, weight.element_ranges(), *id)?);
            grad_ids.push(*id);
        }
        for &other in &others {
            add_var(other, &mut grads, &mut grad_ids)?;
        }
        let gradients = Arc::new(Gradients::new(backend, mesh, grads, options.grads)?);
        for ((_, weight), at) in weights.iter().rev().zip(heads.len()..) {
            weight.connect(&gradients, at)?;
        }
        let pass = Arc::new(PassState::default());
        let operands = plans
            .into_iter()
            .map(|plan| {
                Arc::new(RecipeOperands::new(
                    backend,
                    plan,
                    Arc::clone(optimizer.scales()),
                    pass.clone(),
                    mesh.world.clone(),
                    memory.clone(),
                ))
            })
            .collect();
        plain_vars.connect(&gradients, &var_grads)?;
        plain_vars.refresh()?;
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
            gradients,
            grad_ids,
            micro_batches: 0,
            vars: plain_vars,
            var_ids: own_vars.into_iter().map(|(id, _)| id).collect(),
            sent_before,
            recast: 0,
            rounded: 0,
            saving: None,
        })
    }
}

impl<B: Backend> Builder<'_, B> {
    /// One parameter: the full weight, with this rank's slice registered with the optimizer, and the slices of all
    /// ranks. `init` makes the values of rows.
    fn flat_param<R: Recipe>(
        &self,
        recipe: R,
        shape: Shape,
        optimizer: &mut OptimizerBuilder<B>,
        init: impl FnOnce(Range<usize>) -> Result<ParamSpec, OptimError>,
    ) -> Result<(Whole<B, R>, ParamId), OptimError> {
        check_flat(&recipe, Usage::BOTH)?;
        let comm = &self.mesh.shard;
        let tensor = QuantizedTensor::new(recipe, shape, Usage::BOTH, |_, bytes| {
            Ok::<_, OptimError>(self.backend.alloc::<u8>(bytes)?)
        })?;
        let ranges = self.flat_ranges(&recipe, shape)?;
        let own = ranges[comm.rank()].clone();
        let id = optimizer.flat_param(&tensor, own.start, init(own.clone())?)?;
        optimizer.matrix(
            id,
            MatrixCut {
                full: shape,
                ranges: ranges.clone(),
                tiles: None,
            },
        )?;
        Ok(((tensor, ranges), id))
    }

    /// Those elements where rows are not cut.
    fn flat_ranges(
        &self,
        recipe: &impl Recipe,
        shape: Shape,
    ) -> Result<Vec<Range<usize>>, OptimError> {
        let state = (self.options.state, self.options.group.rule);
        let shards = flat_shards(recipe, shape, self.mesh.shard.world_size(), state)?;
        Ok(shards.iter().map(FlatShard::elements).collect())
    }

    /// How weights are cut; where ranks have slices of flattened weights, as if by rows.
    pub(crate) fn cuts<R: Recipe>(
        &self,
        recipe: impl Fn(&LinearSpec) -> R,
        linears: &[LinearSpec],
    ) -> Result<Vec<BlockCuts>, OptimError> {
        let ranks = self.mesh.shard.world_size();
        let unit = self.options.state.unit(self.options.group.rule);
        let weight = |spec: &LinearSpec| (recipe(spec), Shape::new(spec.rows, spec.cols));
        let mut all = Vec::with_capacity(linears.len());
        // Equal blocks are cut alike.
        let mut known: Vec<CutBlock<R>> = Vec::new();
        for block in linears.chunk_by(|a, b| a.block == b.block) {
            let weights: Vec<(R, Shape)> = block.iter().map(weight).collect();
            if let Some((_, same)) = known.iter().find(|(known, _)| *known == weights) {
                all.extend_from_within(same.clone());
                continue;
            }
            let cuts = match self.options.sharding {
                Sharding::Fsdp => block_cuts(&weights, ranks, unit),
                Sharding::Zero1 => cut_by_rows(&weights, ranks, unit),
            };
            let start = all.len();
            all.extend(cuts.map_err(ShardError::from)?);
            known.push((weights, start..all.len()));
        }
        Ok(all)
    }

    /// The elements whose masters each rank has, in rank order: of the flattened tall matrix that `cuts` cuts, or of the flattened weight.
    pub(crate) fn element_ranges(
        &self,
        recipe: &impl Recipe,
        cuts: &BlockCuts,
    ) -> Result<Vec<Range<usize>>, OptimError> {
        match self.options.sharding {
            Sharding::Fsdp => {
                let spec = ShardSpec::of_block(recipe, cuts, self.mesh.shard.rank())?;
                Ok(spec.all_elements())
            }
            Sharding::Zero1 => self.flat_ranges(recipe, cuts.tiles.full()),
        }
    }

    /// One parameter: this rank's shard, registered with the optimizer.
    fn param<R: Recipe>(
        &self,
        recipe: R,
        cuts: &BlockCuts,
        optimizer: &mut OptimizerBuilder<B>,
        spec: impl FnOnce(&ShardSpec) -> Result<ParamSpec, OptimError>,
    ) -> Result<(ShardedTensor<B, R>, ParamId), OptimError> {
        let shard = ShardSpec::of_block(&recipe, cuts, self.mesh.shard.rank())?;
        let spec = spec(&shard)?;
        let cut = MatrixCut {
            full: cuts.tiles.full(),
            ranges: shard.all_elements(),
            tiles: Some(cuts.tiles),
        };
        let tensor = ShardedTensor::new(self.backend, recipe, shard)?;
        let id = optimizer.param(tensor.local(), spec)?;
        optimizer.matrix(id, cut)?;
        Ok((tensor, id))
    }
}

/// How weights are cut by themselves, at multiples of `unit` elements.
pub(crate) fn cut_by_rows<R: Recipe>(
    weights: &[(R, Shape)],
    ranks: usize,
    unit: usize,
) -> Result<Vec<BlockCuts>, FormatError> {
    let cut = |(recipe, shape): &(R, Shape)| BlockCuts::of_rows(recipe, *shape, ranks, unit);
    weights.iter().map(cut).collect()
}

/// The slices of the masters of a weight that every rank has whole, cut where the narrowest codes, and states in dtypes by a rule, may be. Where the
/// weight is a half of its masters, cuts are at multiples of 16 bytes of it: a GPU updates it by vectors.
pub(crate) fn flat_shards(
    recipe: &impl Recipe,
    shape: Shape,
    ranks: usize,
    (state, rule): (StateDtypes, Rule),
) -> Result<Vec<FlatShard>, ShardError> {
    let vector = match state.of_recipe(recipe).master {
        MasterDtype::Bf16Plus16 => 8,
        MasterDtype::F32 | MasterDtype::Bf16 => 1,
    };
    let unit = lcm(state.unit(rule), vector);
    let codes = recipe.quantizers(Role::Weight).kernels();
    let [row, col] = codes.map(|key| key.element);
    let code = if col.bits() < row.bits() { col } else { row };
    FlatShard::split_at(shape, code, ranks, unit)
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

#[cfg(test)]
mod tests {
    use super::*;
    use lowp_format::{AnyRecipe, RecipeOptions};

    #[test]
    fn slices_of_halves_begin_at_vectors() {
        let recipe =
            |name| AnyRecipe::from_name(name, &RecipeOptions::default()).expect("a recipe");
        for (name, state, unit) in [
            ("bf16", "f32", 1),
            ("bf16", "master=bf16+16", 8),
            ("bf16", "master=bf16+16,exp_avg=fp8,exp_avg_sq=fp8", 32),
            ("fp8-current", "master=bf16+16", 1),
        ] {
            let state = (state.parse().expect("dtypes"), Rule::AdamW);
            for (shape, ranks) in [(Shape::new(64, 33), 3), (Shape::new(7, 5), 3)] {
                let slices = flat_shards(&recipe(name), shape, ranks, state).expect("slices");
                let starts: Vec<usize> = slices.iter().map(|s| s.elements().start).collect();
                let each = shape.elements().div_ceil(ranks).next_multiple_of(unit);
                let expected = (0..ranks).map(|rank| (rank * each).min(shape.elements()));
                assert_eq!(starts, Vec::from_iter(expected), "{name} {unit}");
            }
        }
    }
}
