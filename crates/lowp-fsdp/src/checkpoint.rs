//! A [`ShardedModel`] in and out of checkpoints.
//!
//! Masters and the states of the optimizer's rule are slices of flattened parameters, weights are rows of their buffers, and scales and counts are whole: each
//! is a tensor of the checkpoint, of which ranks have pieces.

use std::cell::Cell;
use std::ops::Range;

use lowp_checkpoint::{Block, Checkpoint, Dtype, Late, Piece};
use lowp_comm::{CommError, MeshComm, or_abort};
use lowp_format::{Recipe, ShardTiles, is_in_bf16};
use lowp_gemm::Multiplies;
use lowp_kernels::{Backend, StepCounts, bf16};
use lowp_optim::{
    FloatDtype, MasterDtype, OptimError, PendingValues, Rule, StateDtypes, StateName,
};
use lowp_shard::{DelayedState, ScaleBook, ScaleSlot, ShardError};
use serde_json::{Value, json};

use crate::builder::{Builder, NewParam};
use crate::error::ModelError;
use crate::saving::Saving;
use crate::sharded_model::{ModelOptions, ShardedModel, to_bytes};
use crate::spec::{LinearSpec, VarSpec};
use crate::tile_pieces::{TileLayout, read_values};

/// The tensor of the numbers of steps.
const COUNTS: &str = "optimizer.counts";
/// The tensor of a parameter's masters, next to those of its states.
const MASTER: &str = StateDtypes::MASTER;

/// A model in a checkpoint, with what the index of the checkpoint says of it.
#[derive(Clone, Copy, Debug)]
pub struct SavedModel<'a> {
    /// The checkpoint.
    pub checkpoint: &'a Checkpoint,
    /// What [`ShardedModel::about`] returned when it was saved.
    pub weights: &'a Value,
    /// What [`ShardedModel::about_scales`] returned.
    pub scales: &'a Value,
}

/// Pieces of masters and of states, on their way from `stream`: a file has all masters before the states.
struct StatePieces<'a, B: Backend> {
    stream: &'a B,
    masters: Vec<Piece<Late>>,
    states: Vec<Piece<Late>>,
}

impl<B: Backend> StatePieces<'_, B> {
    /// Where pieces of a tensor belong: `what` is that of a parameter.
    fn list(&mut self, what: &str) -> &mut Vec<Piece<Late>> {
        match what {
            MASTER => &mut self.masters,
            _ => &mut self.states,
        }
    }
}

impl<B: Multiplies, R: Recipe> ShardedModel<B, R> {
    /// The model that resumes from a checkpoint, `saved` on any mesh with either sharding. Weights that live in the same format as there have the
    /// bytes that were saved; others are cast from their masters ([`ShardedModel::recast`]), and those in bf16 are always made of their masters. Collective.
    ///
    /// # Errors
    /// A checkpoint of another model or that is damaged, or what [`ShardedModel::new`] reports.
    pub fn load(
        backend: &B,
        mesh: &MeshComm<B>,
        recipe: impl Fn(&LinearSpec) -> R,
        linears: &[LinearSpec],
        vars: &[VarSpec],
        options: ModelOptions,
        saved: SavedModel<'_>,
    ) -> Result<Self, ModelError> {
        let checkpoint = saved.checkpoint;
        let id = format!("{} of step {}", checkpoint.id(), checkpoint.step());
        let control = mesh.world.control();
        control.all_equal("the checkpoint", &id)?;
        let builder = Builder {
            backend,
            mesh,
            options,
        };
        let rounded = Cell::new(0);
        let values = |param: &NewParam<'_>, elements: Range<usize>| {
            let tensor = format!("{}.{}", param.name, MASTER);
            let read = read_values(checkpoint, &tensor, param.tiles(), elements);
            let values = read.map_err(|error| OptimError::Shard(failed(mesh, &error)))?;
            let rounds = |&x: &f32| bf16::from_f32(x).to_f32() != x;
            let narrow = options.state.master == MasterDtype::Bf16;
            rounded.update(|n: usize| n + usize::from(narrow && values.iter().any(rounds)));
            Ok(values)
        };
        let model = builder.build(recipe, linears, vars, &values);
        let mut model = or_abort(&*mesh.world, model)?;
        model.rounded = rounded.get();
        let restored = model.restore(saved);
        or_abort(&*mesh.world, restored)?;
        Ok(model)
    }
}

impl<B: Backend, R: Recipe> ShardedModel<B, R> {
    /// This rank's pieces of all that training needs to go on: masters, states, counts of steps, weights as they are stored, and the
    /// histories of delayed scales. Replicas hold the same, so that only the first one has pieces.
    ///
    /// Of a GPU they are copied by a stream of its own to page-locked memory, which is kept for the next time: it holds as many bytes
    /// as the pieces. The next step may begin; it changes nothing before it was copied.
    ///
    /// # Errors
    /// A micro-batch that was not finished, or a failure of the backend.
    pub fn pieces(&mut self) -> Result<Vec<Piece<Late>>, ModelError> {
        self.check_between_steps()?;
        let (replica, _) = self.mesh.mesh.coordinates(self.mesh.world.rank())?;
        if replica > 0 {
            return Ok(Vec::new());
        }
        let mut saving = match self.saving.take() {
            Some(saving) => saving,
            None => Saving::new(&self.backend)?,
        };
        let first = self.mesh.world.rank() == 0;
        // Small reads, which wait, are made before the long copies.
        let small = if first {
            self.small_pieces()
        } else {
            Ok(Vec::new())
        };
        let large = saving.begin(&self.backend, |stream| self.large_pieces(stream, first));
        self.saving = Some(saving);
        Ok(large?
            .into_iter()
            .chain(small?.into_iter().map(Into::into))
            .collect())
    }

    /// Masters, then states, then weights, as [`ShardedModel::load`] reads them: a file is read from its begin to its end.
    fn large_pieces(&self, stream: &B, first: bool) -> Result<Vec<Piece<Late>>, ModelError> {
        let mut buffers = Vec::new();
        let mut pieces = StatePieces {
            stream,
            masters: Vec::new(),
            states: Vec::new(),
        };
        for ((id, weight), name) in self.weights.iter().zip(&self.names) {
            let elements = &weight.element_ranges()[self.mesh.shard.rank()];
            let tiles = weight.tiles();
            match tiles.are_in_order() {
                true => {
                    self.add_state(&mut pieces, name, *id, elements.start, weight.elements())?;
                }
                false => self.add_tiles(&mut pieces, name, *id, tiles, elements)?,
            }
            buffers.extend(weight.pieces(stream, name, first)?);
        }
        for (id, var) in self.var_ids.iter().zip(self.vars.elements()) {
            self.add_state(&mut pieces, var.name, *id, var.own.start, var.len)?;
        }
        let StatePieces {
            masters, states, ..
        } = pieces;
        Ok([masters, states, buffers].into_iter().flatten().collect())
    }

    /// Counts of steps and delayed scales.
    fn small_pieces(&self) -> Result<Vec<Piece>, ModelError> {
        let counts = self.optimizer.counts()?.to_bytes();
        let mut pieces = vec![bytes_piece(COUNTS.to_owned(), counts.to_vec())];
        let book = self.optimizer.scales();
        for (name, slot) in self.delayed_scales()? {
            let Some(state) = book.delayed_state(slot)? else {
                continue;
            };
            let values = [&[state.scale], state.history.as_slice()].concat();
            pieces.push(f32_piece(name, &values));
        }
        Ok(pieces)
    }

    /// What the optimizer keeps of a parameter, on its way, with the names of its tensors: the master, then the states.
    fn start_state(
        &self,
        id: lowp_optim::ParamId,
        stream: &B,
    ) -> Result<impl Iterator<Item = (&'static str, PendingValues)>, ModelError> {
        let state = self.optimizer.start_state(id, stream)?;
        let names = self.optimizer.rule(id)?.states().iter();
        let names = [MASTER].into_iter().chain(names.map(|name| name.name()));
        Ok(names.zip([state.master].into_iter().chain(state.states)))
    }

    /// Adds the master and the states of a parameter of `len` elements, of which this rank has those from `start` on.
    fn add_state(
        &self,
        pieces: &mut StatePieces<'_, B>,
        name: &str,
        id: lowp_optim::ParamId,
        start: usize,
        len: usize,
    ) -> Result<(), ModelError> {
        for (what, values) in self.start_state(id, pieces.stream)? {
            let bytes = values.len() * values.dtype().bytes();
            let dtype = dtype_of(values.dtype());
            pieces.list(what).push(Piece {
                name: format!("{name}.{what}"),
                dtype,
                full: [1, len],
                block: Block::of_row(start, values.len()),
                bytes: Late::new(bytes, || values.wait().map_err(|e| e.to_string())),
            });
        }
        Ok(())
    }

    /// Adds those of the tiles that have `elements` of the flattened tall matrix.
    fn add_tiles(
        &self,
        pieces: &mut StatePieces<'_, B>,
        name: &str,
        id: lowp_optim::ParamId,
        tiles: &ShardTiles,
        elements: &Range<usize>,
    ) -> Result<(), ModelError> {
        let each = tiles.tile().elements();
        for (what, values) in self.start_state(id, pieces.stream)? {
            let owned = elements.start / each..elements.end / each;
            let layout = TileLayout::of_elements(tiles, dtype_of(values.dtype()));
            let arrive = move || values.wait().map_err(|e| e.to_string());
            let of_tiles = layout.pieces(&format!("{name}.{what}"), tiles, owned, arrive);
            pieces.list(what).extend(of_tiles);
        }
        Ok(())
    }

    /// What the parameters are, by name, for the index of a checkpoint: their shapes, and the formats of weights.
    pub fn about(&self) -> Value {
        let weights = self.weights.iter().zip(&self.names);
        let weights = weights.map(|((_, weight), name)| (name.clone(), weight.about()));
        let vars = self.vars.about();
        Value::Object(weights.chain(vars).collect())
    }

    /// What the delayed scales are made for, by name of their tensor, for the index of a checkpoint.
    ///
    /// # Errors
    /// None: the entries are those of this model's book.
    pub fn about_scales(&self) -> Result<Value, ModelError> {
        let book = self.optimizer.scales();
        let scales = self.delayed_scales()?.into_iter();
        let about = scales.map(|(name, slot)| Ok((name, about_scale(book, slot)?)));
        Ok(Value::Object(about.collect::<Result<_, ModelError>>()?))
    }

    /// Everything but the masters.
    fn restore(
        &mut self,
        SavedModel {
            checkpoint,
            weights,
            scales,
        }: SavedModel<'_>,
    ) -> Result<(), ModelError> {
        self.check_states(checkpoint)?;
        // The masters are those that it was built with.
        for ((id, weight), name) in self.weights.iter().zip(&self.names) {
            let elements = weight.element_ranges()[self.mesh.shard.rank()].clone();
            let tiles = weight.tiles();
            let read = |what: &str| {
                let name = format!("{name}.{what}");
                read_values(checkpoint, &name, tiles, elements.clone())
            };
            let rule = self.optimizer.rule(*id)?;
            let states = rule.states().iter().map(|state| read(state.name()));
            let states = states.collect::<Result<Vec<_>, _>>()?;
            self.rounded += self.optimizer.set_states(*id, &states)?;
        }
        for (id, var) in self.var_ids.iter().zip(self.vars.elements()) {
            let read = |what: &str| {
                let block = Block::of_row(var.own.start, var.own.len());
                checkpoint.read_f32(&format!("{}.{what}", var.name), [1, var.len], block)
            };
            let rule = self.optimizer.rule(*id)?;
            let states = rule.states().iter().map(|state| read(state.name()));
            let states = states.collect::<Result<Vec<_>, _>>()?;
            self.rounded += self.optimizer.set_states(*id, &states)?;
        }
        let counts = checkpoint.read(COUNTS, Dtype::U8, [1, 16], Block::whole([1, 16]))?;
        let counts: [u8; 16] = counts.try_into().unwrap_or_default();
        self.optimizer.set_counts(StepCounts::from_bytes(&counts))?;
        for ((_, weight), name) in self.weights.iter().zip(&self.names) {
            // Codes of wider masters are not those of the masters that they became.
            let saved = checkpoint.float_dtype(&format!("{name}.{MASTER}"));
            let narrow = self.options.state.master == MasterDtype::Bf16;
            let wider = narrow && saved != dtype_of(FloatDtype::Bf16);
            match weights.get(name) == Some(&weight.about()) && !wider {
                // Values follow from masters alone: they may be a half of them here or there (docs/numerics.md 23.5).
                true if is_in_bf16(&weight.recipe()) => {}
                true => weight.restore(name, checkpoint)?,
                false => self.recast += 1,
            }
        }
        if let Some(gather) = self.optimizer.flat_gather() {
            gather.derive()?;
        }
        let book = self.optimizer.scales();
        for (name, slot) in self.delayed_scales()? {
            if scales.get(&name) == Some(&about_scale(book, slot)?) {
                restore_scale(book, slot, &name, checkpoint)?;
            }
        }
        Ok(())
    }

    /// Checks that the states of every parameter in `checkpoint` are those of its rule.
    fn check_states(&self, checkpoint: &Checkpoint) -> Result<(), ModelError> {
        let ids = self.weights.iter().map(|(id, _)| id).chain(&self.var_ids);
        let vars = self.vars.elements().map(|var| var.name);
        let names = self.names.iter().map(String::as_str).chain(vars);
        let mut others = Vec::new();
        for (&id, name) in ids.zip(names) {
            let has = |state: &StateName| {
                let tensor = format!("{name}.{}", state.name());
                checkpoint.info(&tensor).is_some()
            };
            let saved: Vec<StateName> = StateName::ALL.into_iter().filter(has).collect();
            let rule = self.optimizer.rule(id)?;
            if saved != rule.states() {
                others.push((name, saved, rule));
            }
        }
        let Some((name, saved, rule)) = others.first() else {
            return Ok(());
        };
        let by = Rule::ALL.into_iter().find(|rule| rule.states() == *saved);
        Err(ModelError::OtherOptimizer {
            name: (*name).to_owned(),
            saved: StateName::list(saved).into(),
            saved_by: by.map_or("another optimizer", Rule::name),
            rule: rule.name(),
            needed: StateName::list(rule.states()).into(),
            differ: others.len(),
            params: self.optimizer.len(),
        })
    }

    /// Number of linear weights that were cast from their masters, because the checkpoint has them in other formats, or wider masters.
    /// Those that are in bf16 here and there are not counted.
    pub fn recast(&self) -> usize {
        self.recast
    }

    /// Number of masters and states of this rank of which a value was rounded, because the checkpoint has it in a wider dtype.
    pub fn rounded(&self) -> usize {
        self.rounded
    }

    /// The delayed scales by name.
    fn delayed_scales(&self) -> Result<Vec<(String, ScaleSlot)>, ModelError> {
        let mut found = Vec::new();
        for (((id, _), operands), name) in self.weights.iter().zip(&self.operands).zip(&self.names)
        {
            let stored = self.optimizer.slots(*id)?;
            let slots = stored.into_iter().chain(operands.slots());
            let kinds = ["weight", "activation", "gradient", "weight_operand"];
            let names = kinds.iter().flat_map(|kind| {
                ["rowwise", "columnwise"].map(|o| format!("{name}.{kind}.{o}.scale"))
            });
            for (name, slot) in names.zip(slots) {
                found.extend(slot.map(|slot| (name, slot)));
            }
        }
        Ok(found)
    }
}

/// What values of an optimizer are in a checkpoint: as they are.
fn dtype_of(dtype: FloatDtype) -> Dtype {
    match dtype {
        FloatDtype::F32 => Dtype::F32,
        FloatDtype::Bf16 => Dtype::Bf16,
    }
}

/// The failure of this rank, as text for the others.
pub(crate) fn failed<B: Backend>(mesh: &MeshComm<B>, error: &impl ToString) -> ShardError {
    CommError::Failed {
        rank: mesh.world.rank(),
        message: error.to_string(),
    }
    .into()
}

/// What the scale of `slot` is made for.
fn about_scale<B: Backend>(book: &ScaleBook<B>, slot: ScaleSlot) -> Result<Value, ModelError> {
    let (element, rule) = book.ingredients(slot)?;
    Ok(json!(format!("{element} {rule:?}")))
}

/// The state of a delayed scale.
fn restore_scale<B: Backend>(
    book: &ScaleBook<B>,
    slot: ScaleSlot,
    name: &str,
    checkpoint: &Checkpoint,
) -> Result<(), ModelError> {
    let Some(own) = book.delayed_state(slot)? else {
        return Ok(());
    };
    let shape = [1, 1 + own.history.len()];
    let values = checkpoint.read_f32(name, shape, Block::whole(shape))?;
    let state = DelayedState {
        scale: values[0],
        history: values[1..].to_vec(),
    };
    Ok(book.set_delayed_state(slot, &state)?)
}

/// All of a row of values.
fn f32_piece(name: String, values: &[f32]) -> Piece {
    Piece {
        dtype: Dtype::F32,
        full: [1, values.len()],
        block: Block::whole([1, values.len()]),
        ..bytes_piece(name, to_bytes(values))
    }
}

/// All of a row of bytes.
fn bytes_piece(name: String, bytes: Vec<u8>) -> Piece {
    let full = [1, bytes.len()];
    Piece {
        name,
        dtype: Dtype::U8,
        full,
        block: Block::whole(full),
        bytes,
    }
}
