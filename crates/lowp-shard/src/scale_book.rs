//! [`ScaleBook`]: the amax observations, histories and scales of all tensors, owned by the
//! training loop. Recipes and tensors hold no state.

use std::collections::BTreeMap;
use std::iter;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use lowp_format::{
    Code, Extent, Orientation, Quantizers, Recipe, Role, ScaleRule, Shape, Usage, tensor_scale,
};
use lowp_kernels::{Backend, BlockAmax, HistoryJob, Slot, StepScalars, TensorInput, Work};

use crate::ShardError;
use lowp_comm::{Communicator, or_abort, ordered};

mod cuts;
mod state;

use cuts::Cuts;
pub use state::DelayedState;

/// What scales depend on: one amax of a tensor, or one of each of its lines.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Entry {
    rule: ScaleRule,
    element: Code,
    orientation: Orientation,
    /// Number of amaxes.
    count: usize,
    /// Whether they are this rank's own: of rows that no other rank has.
    own: bool,
}

impl Entry {
    fn is_tensor(&self) -> bool {
        matches!(self.rule.outer(), Some((Extent::Tensor, _)))
    }

    /// What encoding uses, of the `known` scale and the observed `amax`.
    fn used(&self, known: f32, amax: f32) -> f32 {
        match self.rule {
            ScaleRule::Current { pow2, epsilon, .. } => {
                tensor_scale(amax.abs(), self.element, pow2, epsilon)
            }
            ScaleRule::TwoLevel { .. } => amax.abs(),
            _ => known,
        }
    }
}

/// An entry of a scale book, as its builder gave it out: of a tensor, or of its lines. It means nothing in another
/// book, which rejects it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ScaleSlot {
    book: u64,
    index: usize,
}

/// The entries of the block amaxes of a flat shard, as a builder reserved them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockSlots {
    book: u64,
    block: [usize; 2],
    /// The first entry, counted from the first block amax.
    start: usize,
}

impl BlockSlots {
    /// Block rows x columns.
    pub fn block(self) -> [usize; 2] {
        self.block
    }
}

/// Collects the tensors of a [`ScaleBook`]; sizes are fixed when it is built.
#[derive(Debug)]
pub struct ScaleBookBuilder {
    id: u64,
    entries: Vec<Entry>,
    blocks: usize,
    /// The group of weights that are registered now.
    group: Option<usize>,
    /// Entries that weights of a group have in common.
    shared: Vec<SharedEntry>,
}

/// The entry `index` of the weights of a group.
#[derive(Debug)]
struct SharedEntry {
    group: usize,
    index: usize,
}

impl Default for ScaleBookBuilder {
    /// A builder of its own: no entries yet, and a new [`ScaleBookBuilder::id`].
    fn default() -> Self {
        static BUILDERS: AtomicU64 = AtomicU64::new(0);
        Self {
            id: BUILDERS.fetch_add(1, Ordering::Relaxed),
            entries: Vec::new(),
            blocks: 0,
            group: None,
            shared: Vec::new(),
        }
    }
}

impl ScaleBookBuilder {
    /// A number that this builder and the book made from it share with no others of the process.
    /// Entries carry it; who keeps a book beside other things can check with it.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The group of the weights that are registered from here on; `None`, as a new builder has it, for those that are in none. Weights of
    /// one group whose scales follow from the amax of the tensor by the same rule have one entry, so that their amax is that of
    /// them all, and their delayed scale has one history. Entries of lines and blocks are each weight's own.
    pub fn group(&mut self, group: Option<usize>) {
        self.group = group;
    }

    /// Registers a tensor of `recipe`, all of whose rows are of this rank: a whole tensor or a row shard of `shape`. The
    /// rest as [`ScaleBookBuilder::register_operand`].
    pub fn register(
        &mut self,
        recipe: &impl Recipe,
        shape: Shape,
        usage: Usage,
    ) -> [Option<ScaleSlot>; 2] {
        // Also of a tensor that holds nothing but what stands above its blocks, which serves no product.
        self.add(
            &recipe.quantizers(Role::Weight),
            shape,
            usage,
            true,
            self.group,
        )
    }

    /// Registers rows of `shape` that `quantizers` cast for `usage`. Returns their entries by orientation: `None`
    /// where no scale depends on an amax of the tensor or its lines, or the usage lacks the orientation.
    pub fn register_operand(
        &mut self,
        quantizers: &Quantizers,
        shape: Shape,
        usage: Usage,
    ) -> [Option<ScaleSlot>; 2] {
        if usage.is_empty() {
            return [None; 2];
        }
        self.add(quantizers, shape, usage, true, None)
    }

    /// Registers a slice of the flattened matrix of `shape`, whose rows several ranks may share.
    pub fn register_flat(
        &mut self,
        quantizers: &Quantizers,
        shape: Shape,
        usage: Usage,
    ) -> [Option<ScaleSlot>; 2] {
        self.add(quantizers, shape, usage, false, self.group)
    }

    fn add(
        &mut self,
        quantizers: &Quantizers,
        shape: Shape,
        usage: Usage,
        whole_rows: bool,
        group: Option<usize>,
    ) -> [Option<ScaleSlot>; 2] {
        let mut slots: [Option<ScaleSlot>; 2] = [None; 2];
        for served in quantizers.outer_usages(usage) {
            let Some(orientation) = served.orientations().next() else {
                continue;
            };
            let key = quantizers.of(orientation).kernel;
            let Some((extent, _)) = key.scale.outer() else {
                continue;
            };
            // The amax of the same values is one entry, whatever is made of it.
            let first = slots[Orientation::Rowwise as usize];
            let same = first.filter(|slot| {
                let row = quantizers.rowwise.kernel;
                let both = [row.scale, key.scale].iter().all(ScaleRule::waits_for_amax);
                both && row.hadamard == key.hadamard
                    && extent == Extent::Tensor
                    && self.entries[slot.index].is_tensor()
            });
            let slot = same.unwrap_or_else(|| {
                let entry = Entry {
                    rule: key.scale,
                    element: key.element,
                    orientation,
                    count: extent.entries(orientation, shape),
                    own: whole_rows
                        && extent == Extent::Line
                        && orientation == Orientation::Rowwise,
                };
                ScaleSlot {
                    book: self.id,
                    index: self.place(entry, group),
                }
            });
            for orientation in served.orientations() {
                slots[orientation as usize] = Some(slot);
            }
        }
        slots
    }

    /// Where `entry` is: among those of its group, if it is there, else after all others.
    fn place(&mut self, entry: Entry, group: Option<usize>) -> usize {
        let group = group.filter(|_| entry.is_tensor());
        let known = self
            .shared
            .iter()
            .find(|shared| Some(shared.group) == group && self.entries[shared.index] == entry);
        if let Some(shared) = known {
            return shared.index;
        }
        let index = self.entries.len();
        self.entries.push(entry);
        self.shared
            .extend(group.map(|group| SharedEntry { group, index }));
        index
    }

    /// Reserves the amaxes of the blocks of a matrix of `shape` (flat shards only).
    pub fn reserve_blocks(&mut self, shape: Shape, block: [usize; 2]) -> BlockSlots {
        let start = self.blocks;
        self.blocks += shape.rows.div_ceil(block[0]) * shape.cols.div_ceil(block[1]);
        BlockSlots {
            book: self.id,
            block,
            start,
        }
    }

    /// Allocates the book. Every scale starts at 1, every history at zeros.
    ///
    /// # Errors
    /// The backend has no room.
    pub fn build<B: Backend>(self, backend: &B) -> Result<ScaleBook<B>, ShardError> {
        let Self {
            id,
            entries,
            blocks,
            ..
        } = self;
        // Tensors, then lines, then blocks, all of which ranks agree on; then lines of this rank alone.
        let mut starts = vec![0; entries.len()];
        let mut end = 0;
        let mut place = |of: &dyn Fn(&Entry) -> bool| {
            for (start, entry) in starts.iter_mut().zip(&entries).filter(|(_, e)| of(e)) {
                *start = end;
                end += entry.count;
            }
            end
        };
        let tensors = place(&Entry::is_tensor);
        let lines = place(&|entry| !entry.is_tensor() && !entry.own);
        let own = place(&|entry| entry.own) - lines;
        for (start, _) in starts.iter_mut().zip(&entries).filter(|(_, e)| e.own) {
            *start += blocks;
        }
        let observed = backend.alloc::<f32>(lines + blocks + own)?;
        let agreed = backend.view::<f32>(&observed, 0..lines + blocks)?;
        let scales = backend.upload(&vec![1.0f32; tensors])?;
        let mut jobs = Vec::new();
        for (entry, &index) in entries.iter().zip(&starts) {
            if let ScaleRule::Delayed {
                window,
                algorithm,
                margin,
            } = entry.rule
            {
                jobs.push(HistoryJob {
                    observed: observed.clone(),
                    scales: scales.clone(),
                    index,
                    history: backend.alloc::<f32>(window)?,
                    algorithm,
                    margin,
                    element: entry.element,
                });
            }
        }
        let history = |job: &HistoryJob<B>| (job.index, job.history.clone());
        let histories = jobs.iter().map(history).collect();
        let roll = backend.plan(Work::History(jobs))?;
        Ok(ScaleBook {
            id,
            backend: backend.clone(),
            entries,
            starts,
            first_block: lines,
            observed,
            agreed,
            cuts: OnceLock::new(),
            scales,
            histories,
            roll,
        })
    }
}

/// The scales of a model. A cast has three phases: *observe* raises entries of the observed vector,
/// *agree* reduces that one vector over all ranks and rolls the histories of delayed scales,
/// *encode* reads delayed scales, or makes a scale of the agreed amax and consumes it
/// ([`TensorInput::Observed`]).
#[derive(Debug)]
pub struct ScaleBook<B: Backend> {
    id: u64,
    backend: B,
    entries: Vec<Entry>,
    /// Where the amaxes of each entry begin.
    starts: Vec<usize>,
    /// Where the amaxes of blocks begin.
    first_block: usize,
    observed: B::Buffer<f32>,
    /// What ranks agree on: the beginning of `observed`.
    agreed: B::Buffer<f32>,
    /// The parts of `agreed` that ranks agree on, where that is not all.
    cuts: OnceLock<Cuts<B>>,
    /// Scales of the entries of tensors, which come first.
    scales: B::Buffer<f32>,
    /// Amax histories of delayed scales, by the place of the entry.
    histories: BTreeMap<usize, B::Buffer<f32>>,
    roll: B::Plan,
}

impl<B: Backend> ScaleBook<B> {
    /// The number of the builder that it was made from ([`ScaleBookBuilder::id`]).
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Where amax jobs write: the amaxes of tensors, of lines, of blocks, and of rows that are this rank's own.
    pub fn observed(&self) -> &B::Buffer<f32> {
        &self.observed
    }

    /// The entries of the book, in the order in which they were registered.
    pub fn slots(&self) -> impl ExactSizeIterator<Item = ScaleSlot> + use<B> {
        let book = self.id;
        (0..self.entries.len()).map(move |index| ScaleSlot { book, index })
    }

    /// The place of `slot` in the observed vector, and of a tensor in [`ScaleBook::scales`]: that of the first line,
    /// where it has lines.
    ///
    /// # Errors
    /// The entry belongs to another book.
    pub fn index(&self, slot: ScaleSlot) -> Result<usize, ShardError> {
        self.own("the entry of a tensor", slot.book)?;
        Ok(self.starts[slot.index])
    }

    /// The entries of `slots`, by orientation, as what an observation raises: that of the tensor, and the lines of
    /// either orientation.
    ///
    /// # Errors
    /// An entry belongs to another book, or two entries are of the tensor ([`ShardError::TwoAmaxes`]).
    pub fn observation(
        &self,
        slots: [Option<ScaleSlot>; 2],
    ) -> Result<(Option<usize>, [Option<usize>; 2]), ShardError> {
        let (mut tensor, mut lines) = (None, [None; 2]);
        for slot in slots.into_iter().flatten() {
            let index = self.index(slot)?;
            let entry = &self.entries[slot.index];
            match entry.is_tensor() {
                true if tensor.is_some_and(|other| other != index) => {
                    return Err(ShardError::TwoAmaxes);
                }
                true => tensor = Some(index),
                false => lines[entry.orientation as usize] = Some(index),
            }
        }
        Ok((tensor, lines))
    }

    fn own(&self, what: &'static str, book: u64) -> Result<(), ShardError> {
        if book == self.id {
            return Ok(());
        }
        Err(ShardError::OtherBook { what })
    }

    /// The entry whose amax an observation raises.
    ///
    /// # Errors
    /// The entry belongs to another book.
    pub fn observed_slot(&self, slot: ScaleSlot) -> Result<Slot<B>, ShardError> {
        Ok(Slot {
            index: self.index(slot)?,
            buffer: self.observed.clone(),
        })
    }

    /// Where the block amaxes of a flat shard lie in the observed vector.
    ///
    /// # Errors
    /// They were reserved in another book.
    pub fn block_amaxes(&self, slots: &[BlockSlots]) -> Result<Vec<BlockAmax>, ShardError> {
        let place = |slots: &BlockSlots| {
            self.own("the entries of block amaxes", slots.book)?;
            Ok(BlockAmax {
                block: slots.block,
                start: self.first_block + slots.start,
            })
        };
        slots.iter().map(place).collect()
    }

    /// What encoding reads for `slot`: the delayed scale, or the agreed amax that it makes its
    /// scale of and consumes. Every rank must encode with it after an agreement, also one that holds
    /// no rows, or its old amax would count in the next one.
    ///
    /// # Errors
    /// The entry belongs to another book.
    pub fn tensor_input(&self, slot: ScaleSlot) -> Result<TensorInput<B>, ShardError> {
        let index = self.index(slot)?;
        Ok(match self.entries[slot.index].rule.waits_for_amax() {
            true => TensorInput::Observed(self.observed_slot(slot)?),
            false => TensorInput::Known(Slot {
                buffer: self.scales.clone(),
                index,
            }),
        })
    }

    /// What encoding reads for each orientation.
    ///
    /// # Errors
    /// An entry belongs to another book.
    pub fn tensor_inputs(
        &self,
        slots: [Option<ScaleSlot>; 2],
    ) -> Result<[Option<TensorInput<B>>; 2], ShardError> {
        let [row, col] = slots.map(|slot| slot.map(|slot| self.tensor_input(slot)).transpose());
        Ok([row?, col?])
    }

    /// What encoding uses of tensors, by entry: the encode scale, or the amax of two-level scales. For
    /// looking at: encodes take it from where it lies.
    ///
    /// # Errors
    /// The backend failed.
    pub fn scales(&self) -> Result<Vec<f32>, ShardError> {
        let mut scales = self.backend.download(&self.scales)?;
        let observed = self.backend.download(&self.observed)?;
        for (entry, &start) in self.entries.iter().zip(&self.starts) {
            if entry.is_tensor() {
                scales[start] = entry.used(scales[start], observed[start]);
            }
        }
        Ok(scales)
    }

    /// What encoding uses for `slot`, as [`ScaleBook::scales`] has it; of lines, for the first.
    ///
    /// # Errors
    /// The entry belongs to another book, or the backend failed.
    pub fn scale(&self, slot: ScaleSlot) -> Result<f32, ShardError> {
        let index = self.index(slot)?;
        let entry = &self.entries[slot.index];
        let [mut known, mut amax] = [[1.0]; 2];
        if entry.is_tensor() {
            self.backend.read(&self.scales, index, &mut known)?;
        }
        if entry.count > 0 {
            self.backend.read(&self.observed, index, &mut amax)?;
        }
        Ok(entry.used(known[0], amax[0]))
    }

    /// Replaces the delayed scale of `slot` by one that is known, such as that of a file. Scales that
    /// are made of an observed amax follow that.
    ///
    /// # Errors
    /// The entry belongs to another book.
    pub fn set_scale(&self, slot: ScaleSlot, value: f32) -> Result<(), ShardError> {
        let index = self.index(slot)?;
        Ok(self.backend.write(&self.scales, index, &[value])?)
    }

    /// Sets the observed amax of `slot`, of a tensor, to that of other values, which observations then raise: its cast has the amax of
    /// both. Entries of lines stay as they are.
    ///
    /// # Errors
    /// The entry belongs to another book, or the backend failed.
    pub fn begin_observation(&self, slot: ScaleSlot, amax: f32) -> Result<(), ShardError> {
        let index = self.index(slot)?;
        match self.entries[slot.index].is_tensor() {
            true => Ok(self.backend.write(&self.observed, index, &[amax])?),
            false => Ok(()),
        }
    }

    /// The amax history of `slot` (delayed scaling), its slot 0 first.
    ///
    /// # Errors
    /// The entry belongs to another book, or the backend failed.
    pub fn history(&self, slot: ScaleSlot) -> Result<Option<Vec<f32>>, ShardError> {
        let history = self.histories.get(&self.index(slot)?);
        Ok(history
            .map(|history| self.backend.download(history))
            .transpose()?)
    }

    /// Agrees on all observations with one max-reduction over one vector, then rolls the histories
    /// of delayed scales. Nothing else runs: encodes read what was agreed.
    ///
    /// Every rank must call it, also one that holds no rows.
    ///
    /// # Errors
    /// A rank failed, or called something else.
    pub fn agree(&self, comm: &dyn Communicator<B>) -> Result<(), ShardError> {
        match self.cuts.get() {
            Some(cuts) => cuts.agree(&self.backend, comm)?,
            None if self.backend.len::<f32>(&self.agreed) == 0 => return Ok(()),
            None => ordered(&self.backend, comm, || comm.all_reduce_max(&self.agreed))?,
        }
        or_abort(comm, self.roll())
    }

    /// Leaves `whole` out of agreements from now on: ranges of the observed vector in the order of ranks, whose amaxes one rank observes
    /// and the others do not use.
    ///
    /// # Errors
    /// Some are left out already, or no room.
    pub(crate) fn agree_without(&self, mut whole: Vec<Range<usize>>) -> Result<(), ShardError> {
        whole.retain(|range| !range.is_empty());
        if whole.is_empty() {
            return Ok(());
        }
        whole.sort_by_key(|range| range.start);
        let (mut agreed, mut start) = (Vec::new(), 0);
        let end = self.backend.len::<f32>(&self.agreed);
        for range in whole.into_iter().chain(iter::once(end..end)) {
            if start < range.start {
                agreed.push(start..range.start);
            }
            start = range.end;
        }
        let cuts = Cuts::new(&self.backend, &self.observed, &agreed)?;
        self.cuts.set(cuts).map_err(|_| ShardError::TwoFlatGathers)
    }

    /// Forgets the observations for delayed scales since the last agreement. Histories and scales
    /// stay; every other amax is consumed by its encode.
    ///
    /// # Errors
    /// The backend failed.
    pub fn forget_observations(&self) -> Result<(), ShardError> {
        for &index in self.histories.keys() {
            self.backend.write(&self.observed, index, &[0.0])?;
        }
        Ok(())
    }

    /// Rolls the histories without a reduction: for tensors that one rank holds whole.
    ///
    /// # Errors
    /// The backend failed.
    pub fn roll(&self) -> Result<(), ShardError> {
        if self.histories.is_empty() {
            return Ok(());
        }
        Ok(self.backend.run(&self.roll, &StepScalars::default())?)
    }
}
