//! [`UpdateJob`]: the optimizer's update of one parameter.

use std::ops::Range;

use lowp_format::{Extent, Orientation, Philox, Shape, ShardTiles, SourceRounding};

use super::{BlockAmax, EncodeJob, Slot};
use crate::{Backend, Master, Rule, Source, State};

/// The amaxes of a new master.
#[derive(Clone, Debug)]
pub struct UpdateAmax<B: Backend> {
    /// Shape of the master, where lines have amaxes.
    pub shape: Shape,
    /// The output vector.
    pub out: B::Buffer<f32>,
    /// Entry of the amax of all values.
    pub tensor: Option<usize>,
    /// First entry of the amaxes of lines, by orientation: of rows, then of columns.
    pub lines: [Option<usize>; 2],
}

impl<B: Backend> UpdateAmax<B> {
    /// The amax of all values, into `slot`.
    pub fn of_tensor(slot: Slot<B>) -> Self {
        Self {
            shape: Shape::new(0, 0),
            out: slot.buffer,
            tensor: Some(slot.index),
            lines: [None; 2],
        }
    }

    /// The amaxes of lines as block amaxes.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = BlockAmax> + use<B> {
        let lines = self.lines;
        Orientation::ALL.into_iter().filter_map(move |orientation| {
            let block = Extent::Line.block(orientation);
            lines[orientation as usize].map(|start| BlockAmax { block, start })
        })
    }
}

/// Which random bits the elements of an update round by (docs/numerics.md 23.1), so that no cut changes a bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UpdateRandom {
    /// Seed, the same on all ranks.
    pub seed: u64,
    /// Stream: one per parameter; the run's `random_step` is added to it from bit 32 on.
    pub stream: u64,
    /// The tiles of the matrix, where they are not in the order of its rows.
    pub tiles: Option<ShardTiles>,
    /// The job's first element, in the flattened tall matrix, or in the flattened matrix where that has the same order.
    pub first: usize,
}

impl UpdateRandom {
    /// Where elements of the job lie in the flattened matrix, run by run in their order.
    pub fn runs(&self, elements: Range<usize>) -> impl Iterator<Item = Range<usize>> + use<> {
        let elements = self.first + elements.start..self.first + elements.end;
        let (tiles, whole) = (self.tiles, elements.clone());
        let runs = tiles
            .into_iter()
            .flat_map(move |tiles| tiles.runs(elements.clone()));
        runs.chain(tiles.is_none().then_some(whole))
    }

    /// The generator of a step.
    pub const fn philox(&self, random_step: u64) -> Philox {
        Philox::new(self.seed, self.stream.wrapping_add(random_step << 32))
    }
}

/// Updates one parameter (docs/numerics.md 12) and, in the same pass, raises its amax and
/// encodes the new master.
#[derive(Clone, Debug)]
pub struct UpdateJob<B: Backend> {
    /// How an element is updated.
    pub rule: Rule,
    /// Master values, updated in place. In bf16 they are rounded stochastically (docs/numerics.md 23.2), and amaxes and codes are those of the
    /// rounded values. In two halves they are the parameter, too: they have neither amaxes nor other codes.
    pub master: Master<B>,
    /// What the rule keeps of each element, in the order of [`Rule::states`], updated in place. Where there are two, the second is f32 or has
    /// the dtype of the first.
    pub states: Vec<State<B>>,
    /// The gradient before clipping; [`Rule::grad_factor`] says what it is multiplied by.
    pub grad: Source<B>,
    /// Which entry of [`crate::StepScalars::groups`] applies.
    pub group: usize,
    /// The random bits of states in fp8 and of a master in bf16, which need some.
    pub random: Option<UpdateRandom>,
    /// Rounding of the master before amax and encode.
    pub source_rounding: SourceRounding,
    /// Raised to the amax of the new master, and to those of its lines.
    pub amax: Option<UpdateAmax<B>>,
    /// Encodes the new master: the shape, ingredients, tensor input and targets of an encode whose
    /// source is the master buffer and whose source rounding is that of the job. The tensor input
    /// must be known before the update; `amax` is raised after it.
    pub encode: Option<Box<EncodeJob<B>>>,
}
