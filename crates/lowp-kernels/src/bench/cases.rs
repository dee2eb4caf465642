//! The rows: which work on which shapes.

use lowp_format::{
    AnyRecipe, Axis, Code, Form, Orientation, Part, Quantizers, Recipe, Role, Rounding,
    ScaleLayout, Shape, SourceRounding, Usage,
};

use super::Result;
use super::data::{Supply, target_bytes};
use crate::{
    AmaxJob, Backend, Cuda, DecodeJob, EncodeJob, FlatEncodeJob, FloatDtype, HistoryJob,
    KernelError, MasterDtype, RepackJob, RoundJob, Slot, Source, StateDtype, StochasticKey,
    SumSquaresJob, TensorInput, TransposeJob, UpdateAmax, UpdateJob, Work, rounds,
};

/// What is encoded, and from what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cast {
    role: Role,
    usage: Usage,
    /// Of the source: f32 or bf16.
    source: Code,
    form: Form,
}

impl Cast {
    /// A weight in both orientations, from bf16.
    const WEIGHT: Self = Self {
        role: Role::Weight,
        usage: Usage::BOTH,
        source: Code::Bf16,
        form: Form::Compact,
    };
    /// The operand of the weight gradient, after its transform.
    const HADAMARD: Self = Self {
        role: Role::Activation,
        usage: Usage::COLUMNWISE,
        ..Self::WEIGHT
    };
    /// The operand of the input gradient.
    const STOCHASTIC: Self = Self {
        role: Role::Gradient,
        usage: Usage::ROWWISE,
        ..Self::WEIGHT
    };

    /// `encode bf16 both`.
    fn name(self) -> String {
        let Self { usage, source, .. } = self;
        let mut name = format!("encode {} {usage}", source.to_string().to_lowercase());
        if self.form != Form::Compact {
            name += &format!(", {}", self.form.name());
        }
        match self.role {
            Role::Weight => name,
            Role::Activation => format!("hadamard + {name}"),
            Role::Gradient => format!("{name}, stochastic"),
        }
    }
}

/// What AdamW stores of each element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) master: MasterDtype,
    pub(super) moments: [StateDtype; 2],
}

impl Stored {
    const F32: Self = Self::moments(StateDtype::F32, StateDtype::F32);
    const BF16: Self = Self::moments(StateDtype::Bf16, StateDtype::Bf16);
    const FP8: Self = Self::moments(StateDtype::Fp8, StateDtype::Fp8);
    const NARROWEST: Self = Self {
        master: MasterDtype::Bf16,
        ..Self::FP8
    };
    const REMAINDERS: Self = Self {
        master: MasterDtype::Bf16Plus16,
        ..Self::F32
    };
    const FP8_REMAINDERS: Self = Self {
        master: MasterDtype::Bf16Plus16,
        ..Self::FP8
    };
    /// All but f32.
    const NARROW: [Self; 6] = [
        Self::BF16,
        Self::moments(StateDtype::Bf16, StateDtype::F32),
        Self::FP8,
        Self::NARROWEST,
        Self::REMAINDERS,
        Self::FP8_REMAINDERS,
    ];
    /// Those whose casts have rows.
    const CAST: [Self; 3] = [Self::BF16, Self::FP8, Self::NARROWEST];

    const fn moments(exp_avg: StateDtype, exp_avg_sq: StateDtype) -> Self {
        Self {
            master: MasterDtype::F32,
            moments: [exp_avg, exp_avg_sq],
        }
    }

    /// What the name of a row says of it.
    fn name(self) -> String {
        let moments = match self.moments.map(StateDtype::name) {
            ["f32", "f32"] => String::new(),
            [first, second] if first == second => format!(", {first} moments"),
            [first, _] => format!(", {first} exp_avg"),
        };
        match self.master {
            MasterDtype::F32 => moments,
            master => format!("{moments}, {} masters", master.name()),
        }
    }

    /// Bytes of the master of an element, of which the parameter may be a half.
    fn master_bytes(self) -> usize {
        match self.master {
            MasterDtype::Bf16Plus16 => 4,
            master => master.bytes(),
        }
    }

    /// Master and moments read and written, the gradient read.
    fn bytes(self, shape: Shape) -> usize {
        let len = shape.elements();
        let moments = self.moments.map(|moment| moment.bytes(len));
        2 * (self.master_bytes() * len + moments.iter().sum::<usize>()) + 2 * len
    }
}

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Adamw(Stored),
    AdamwEncode(Stored),
    Encode(Cast),
    FlatEncode,
    Decode(FloatDtype),
    /// An operand of products of values, in bf16.
    Round(Role),
    Amax,
    SumSquares,
    Transpose(Code),
    Swizzle,
}

/// One row: which work on which shapes.
#[derive(Clone, Debug)]
pub struct Case {
    /// Operation, recipe or `-`, and shapes.
    pub names: [String; 3],
    operation: Operation,
    recipe: Option<AnyRecipe>,
    /// Tensors of one run.
    pub(super) tensors: usize,
    pub(super) shape: Shape,
}

/// The work of one run, in order, and the bytes that it must move.
pub(super) struct CaseWork {
    pub(super) work: Vec<Work<Cuda>>,
    pub(super) bytes: usize,
}

/// Every row; both sides of every shape are divided by `shrink`.
pub fn cases(shrink: usize) -> Vec<Case> {
    let square = |side: usize| Shape::new(side / shrink, side / shrink);
    let case = |operation, recipe, tensors, shape| Case::new(operation, recipe, tensors, shape);
    let steps = [(16, square(4096)), (256, square(1024)), (1000, square(256))];
    let matrix = square(16384);
    let mut cases = Vec::new();
    for (tensors, shape) in steps {
        cases.push(case(Operation::Adamw(Stored::F32), None, tensors, shape));
        for recipe in AnyRecipe::low_precision() {
            let operation = Operation::AdamwEncode(Stored::F32);
            cases.push(case(operation, Some(recipe), tensors, shape));
        }
    }
    let [large, _, small] = steps;
    for (tensors, shape) in [large, small] {
        for stored in Stored::NARROW {
            cases.push(case(Operation::Adamw(stored), None, tensors, shape));
        }
        for stored in Stored::CAST {
            for recipe in AnyRecipe::low_precision() {
                let operation = Operation::AdamwEncode(stored);
                cases.push(case(operation, Some(recipe), tensors, shape));
            }
        }
    }
    let has_swizzled = |recipe: &AnyRecipe| {
        swizzle_layouts(recipe, matrix).is_ok_and(|layouts| !layouts.is_empty())
    };
    let (both, row) = (Usage::BOTH, Usage::ROWWISE);
    let weights = [
        (Code::Bf16, both),
        (Code::Bf16, row),
        (Code::F32, both),
        (Code::F32, row),
    ]
    .map(|(source, usage)| Cast {
        source,
        usage,
        ..Cast::WEIGHT
    });
    let swizzled = Cast {
        form: Form::Swizzled,
        ..Cast::WEIGHT
    };
    let casts = weights
        .into_iter()
        .chain([swizzled, Cast::STOCHASTIC, Cast::HADAMARD]);
    let operations = casts.map(Operation::Encode).chain([
        Operation::FlatEncode,
        Operation::Decode(FloatDtype::F32),
        Operation::Decode(FloatDtype::Bf16),
        Operation::Round(Role::Activation),
        Operation::Round(Role::Gradient),
    ]);
    for operation in operations {
        for recipe in AnyRecipe::low_precision() {
            let columnwise = recipe.quantizers(Role::Activation).columnwise;
            let has = match operation {
                Operation::Encode(Cast::STOCHASTIC) => {
                    recipe.rounding(Role::Gradient) == Rounding::Stochastic
                }
                Operation::Encode(Cast::HADAMARD) => columnwise.kernel.hadamard,
                Operation::Encode(cast) => cast.form == Form::Compact || has_swizzled(&recipe),
                Operation::Round(role) => rounds(&recipe.quantizers(role).kernels(), matrix),
                _ => true,
            };
            if has {
                cases.push(case(operation, Some(recipe), 1, matrix));
            }
        }
    }
    for operation in [
        Operation::Amax,
        Operation::SumSquares,
        Operation::Transpose(Code::E4M3),
        Operation::Transpose(Code::E2M1),
    ] {
        cases.push(case(operation, None, 1, matrix));
    }
    // 2-D scales are few: of eight weights their swizzle is so short that the start of the launch counts. The many come last: rows that
    // follow them get memory in other places and are up to a tenth slower.
    for count in [8, 64] {
        let recipes = AnyRecipe::low_precision().into_iter().filter(has_swizzled);
        cases.extend(recipes.map(|recipe| case(Operation::Swizzle, Some(recipe), count, matrix)));
    }
    cases
}

impl Case {
    fn new(operation: Operation, recipe: Option<AnyRecipe>, tensors: usize, shape: Shape) -> Self {
        let what = match operation {
            Operation::Adamw(stored) => format!("adamw{}", stored.name()),
            Operation::AdamwEncode(stored) => format!("adamw + encode both{}", stored.name()),
            Operation::Encode(cast) => cast.name(),
            Operation::FlatEncode => "flat encode f32 both".to_owned(),
            Operation::Decode(FloatDtype::F32) => "decode rowwise".to_owned(),
            Operation::Decode(FloatDtype::Bf16) => "decode rowwise to bf16".to_owned(),
            Operation::Round(Role::Gradient) => "round bf16 both".to_owned(),
            Operation::Round(_) => "round bf16 rowwise + encode columnwise".to_owned(),
            Operation::Amax => "amax bf16".to_owned(),
            Operation::SumSquares => "sum of squares bf16".to_owned(),
            Operation::Transpose(code) => format!("transpose {code}"),
            Operation::Swizzle => "swizzle both".to_owned(),
        };
        let name = recipe.map_or("-", |recipe| recipe.name());
        let shape_name = format!("{tensors} x {}x{}", shape.rows, shape.cols);
        Self {
            operation,
            recipe,
            tensors,
            shape,
            names: [what, name.to_owned(), shape_name],
        }
    }

    /// Makes the buffers and the work of one run.
    pub(super) fn make(&self, supply: &Supply<'_>) -> Result<CaseWork> {
        let mut made = Steps::default();
        supply.begin();
        for index in 0..self.tensors {
            match self.operation {
                Operation::Adamw(stored) => {
                    made.bytes += stored.bytes(self.shape);
                    made.adamw.push(supply.adamw(self.shape, stored)?);
                }
                Operation::AdamwEncode(stored) => {
                    self.adamw_encode(supply, stored, &mut made)?;
                }
                Operation::Encode(cast) => self.encode(supply, cast, &mut made)?,
                Operation::FlatEncode => self.flat_encode(supply, &mut made)?,
                Operation::Decode(dtype) => self.decode(supply, dtype, &mut made)?,
                Operation::Round(role) => self.round(supply, role, &mut made)?,
                Operation::Amax => {
                    let source = Source::Bf16(supply.halves(self.shape.elements())?);
                    made.bytes += self.shape.elements() * 2;
                    made.amax.push(AmaxJob {
                        shape: self.shape,
                        start: 0,
                        source,
                        source_rounding: SourceRounding::F32,
                        out: supply.observed.clone(),
                        tensor: Some(index),
                        blocks: Vec::new(),
                        hadamard: false,
                    });
                }
                Operation::SumSquares => {
                    let source = Source::Bf16(supply.halves(self.shape.elements())?);
                    made.bytes += self.shape.elements() * 2;
                    let out = supply.cuda.alloc(16)?;
                    made.sums.push(SumSquaresJob { source, out });
                }
                Operation::Transpose(code) => {
                    let entries = [self.shape.rows, self.shape.cols];
                    let bytes = entries[0] * code.bytes(entries[1]);
                    made.bytes += 2 * bytes;
                    made.transpose.push(TransposeJob {
                        code,
                        entries,
                        from: supply.bytes(bytes)?,
                        to: supply.cuda.alloc(entries[1] * code.bytes(entries[0]))?,
                    });
                }
                Operation::Swizzle => {
                    for (from_layout, to_layout) in swizzle_layouts(&self.recipe()?, self.shape)? {
                        made.bytes += from_layout.bytes() + to_layout.bytes();
                        made.repack.push(RepackJob {
                            from_layout,
                            to_layout,
                            from: supply.bytes(from_layout.bytes())?,
                            to: supply.cuda.alloc(to_layout.bytes())?,
                        });
                    }
                }
            }
        }
        Ok(made.finish())
    }

    fn recipe(&self) -> Result<AnyRecipe> {
        self.recipe.ok_or_else(|| missing("the recipe of a row"))
    }

    fn weight(&self) -> Result<Quantizers> {
        Ok(self.recipe()?.quantizers(Role::Weight))
    }

    /// One pass where the scale is known before the values, else update and amax, then encode.
    fn adamw_encode(&self, supply: &Supply<'_>, stored: Stored, made: &mut Steps) -> Result<()> {
        let (recipe, quantizers) = (self.recipe()?, self.weight()?);
        let job = supply.adamw(self.shape, stored)?;
        let master = job.master.values().cloned();
        let master = master.ok_or_else(|| missing("the values of a master"))?;
        let form = Form::Compact;
        let encode = supply.encode(&quantizers, self.shape, Usage::BOTH, master, form)?;
        made.bytes += stored.bytes(self.shape) + target_bytes(&encode.targets);
        let delayed = match &encode.tensor {
            [Some(TensorInput::Known(slot)), _] => Some(slot.index),
            _ => None,
        };
        let amaxes = amax_bytes(&AmaxJob::before(supply.cuda, &encode));
        let (mut job, waiting) = job.with_encode(encode);
        if let Some(index) = delayed {
            let (observed, scales) = (supply.observed.clone(), supply.scales.clone());
            job.amax = Some(UpdateAmax::of_tensor(Slot {
                buffer: observed.clone(),
                index,
            }));
            let history = HistoryJob::new(supply.cuda, &recipe, observed, scales, index)?;
            made.history.extend(history);
        }
        if let Some(encode) = waiting {
            made.bytes += self.shape.elements() * stored.master_bytes() + amaxes;
            made.encode.push(encode);
        }
        made.adamw.push(job);
        Ok(())
    }

    /// With its amax pass where scales follow from an amax of the tensor or its lines.
    fn encode(&self, supply: &Supply<'_>, cast: Cast, made: &mut Steps) -> Result<()> {
        let (source, bytes) = self.source(supply, cast.source)?;
        let operand = self.recipe()?.operand(cast.role);
        let quantizers = &operand.quantizers;
        let mut job = supply.encode(quantizers, self.shape, cast.usage, source, cast.form)?;
        job.stochastic = (operand.rounding == Rounding::Stochastic).then(StochasticKey::default);
        let amax = AmaxJob::before(supply.cuda, &job);
        let passes = if amax.is_empty() { 1 } else { 2 };
        made.bytes += passes * bytes + amax_bytes(&amax) + target_bytes(&job.targets);
        made.amax.extend(amax);
        made.encode.push(job);
        Ok(())
    }

    /// Of the whole matrix, with the pass that raises its amaxes where it needs some.
    fn flat_encode(&self, supply: &Supply<'_>, made: &mut Steps) -> Result<()> {
        let recipe = self.recipe()?;
        let (source, bytes) = self.source(supply, Code::F32)?;
        let (shape, all) = (self.shape, 0..self.shape.elements());
        let mut job = FlatEncodeJob::new(supply.cuda, &recipe, shape, Usage::BOTH, all, source)?;
        job.tensor = supply.tensor(&self.weight()?, shape, Usage::BOTH);
        // Ranks cast in the order of the flattened matrix; other orders are made of it after the gather.
        let data = job
            .targets
            .iter_mut()
            .filter(|t| t.spec.key.part == Part::Data);
        data.for_each(|target| target.spec.axes = [Axis::Rows, Axis::Cols]);
        let amax = AmaxJob::before_flat(supply.cuda, &job);
        let passes = if amax.is_empty() { 1 } else { 2 };
        made.bytes += passes * bytes + amax_bytes(&amax) + target_bytes(&job.targets);
        made.amax.extend(amax);
        made.flat.push(job);
        Ok(())
    }

    /// A source of the matrix and its bytes.
    fn source(&self, supply: &Supply<'_>, code: Code) -> Result<(Source<Cuda>, usize)> {
        let elements = self.shape.elements();
        let source = match code {
            Code::F32 => Source::F32(supply.floats(elements)?),
            _ => Source::Bf16(supply.halves(elements)?),
        };
        Ok((source, elements * code.bits() / 8))
    }

    /// What products read of an operand: a gradient in both orientations, an input in the first, with codes of the other.
    fn round(&self, supply: &Supply<'_>, role: Role, made: &mut Steps) -> Result<()> {
        let (source, bytes) = self.source(supply, Code::Bf16)?;
        let operand = self.recipe()?.operand(role);
        let quantizers = &operand.quantizers;
        let usage = match role {
            Role::Gradient => Usage::empty(),
            Role::Activation | Role::Weight => Usage::COLUMNWISE,
        };
        let form = Form::Compact;
        let mut encode = supply.encode(quantizers, self.shape, usage, source, form)?;
        encode.tensor = supply.tensor(quantizers, self.shape, Usage::BOTH);
        encode.stochastic = (operand.rounding == Rounding::Stochastic).then(StochasticKey::default);
        let amax = AmaxJob::before(supply.cuda, &encode);
        let passes = if amax.is_empty() { 1 } else { 2 };
        made.bytes += passes * bytes + amax_bytes(&amax) + target_bytes(&encode.targets);
        let mut values = [None, None];
        for orientation in (Usage::BOTH - usage).orientations() {
            values[orientation as usize] = Some(supply.cuda.alloc(self.shape.elements())?);
            made.bytes += bytes;
        }
        made.amax.extend(amax);
        made.round.push(RoundJob { encode, values });
        Ok(())
    }

    fn decode(&self, supply: &Supply<'_>, dtype: FloatDtype, made: &mut Steps) -> Result<()> {
        let (orientation, quantizers) = (Orientation::Rowwise, self.weight()?);
        let (source, _) = self.source(supply, Code::Bf16)?;
        let (usage, form) = (orientation.usage(), Form::Compact);
        let encoded = supply.encode(&quantizers, self.shape, usage, source, form)?;
        let cuda = supply.cuda;
        cuda.once(Work::Amax(AmaxJob::before(cuda, &encoded)))?;
        cuda.once(Work::Encode(vec![encoded.clone()]))?;
        let kernel = quantizers.of(orientation).kernel;
        let part = |part| encoded.target(orientation, part).cloned();
        let data = part(Part::Data).ok_or_else(|| missing("rowwise data"))?;
        let outer = kernel.scale.outer();
        let tensor_scale = outer.and_then(|(_, outer)| part(outer));
        made.bytes += target_bytes(&encoded.targets) + self.shape.elements() * dtype.bytes();
        made.decode.push(DecodeJob {
            shape: self.shape,
            kernel,
            data,
            block_scale: part(Part::BlockScale),
            tensor_scale: tensor_scale.map(|target| target.bytes),
            out: Source::alloc(cuda, dtype, self.shape.elements())?,
        });
        Ok(())
    }
}

fn missing(what: &str) -> KernelError {
    let what = what.to_owned();
    KernelError::Missing { what }
}

/// Bytes of amaxes that a first pass writes and a second one reads.
fn amax_bytes(jobs: &[AmaxJob<Cuda>]) -> usize {
    let entries = |job: &AmaxJob<Cuda>| {
        let blocks = job.blocks.iter().map(|part| {
            let count = |len: usize, side: usize| len.div_ceil(side);
            count(job.shape.rows, part.block[0]) * count(job.shape.cols, part.block[1])
        });
        blocks.sum::<usize>() + usize::from(job.tensor.is_some())
    };
    2 * size_of::<f32>() * jobs.iter().map(entries).sum::<usize>()
}

/// Jobs by kind, in the order in which they run.
#[derive(Default)]
struct Steps {
    adamw: Vec<UpdateJob<Cuda>>,
    amax: Vec<AmaxJob<Cuda>>,
    history: Vec<HistoryJob<Cuda>>,
    encode: Vec<EncodeJob<Cuda>>,
    flat: Vec<FlatEncodeJob<Cuda>>,
    decode: Vec<DecodeJob<Cuda>>,
    round: Vec<RoundJob<Cuda>>,
    transpose: Vec<TransposeJob<Cuda>>,
    repack: Vec<RepackJob<Cuda>>,
    sums: Vec<SumSquaresJob<Cuda>>,
    bytes: usize,
}

impl Steps {
    fn finish(self) -> CaseWork {
        let mut work = Vec::new();
        let mut add = |empty: bool, step: Work<Cuda>| {
            if !empty {
                work.push(step);
            }
        };
        add(self.adamw.is_empty(), Work::Update(self.adamw));
        add(self.amax.is_empty(), Work::Amax(self.amax));
        add(self.history.is_empty(), Work::History(self.history));
        add(self.encode.is_empty(), Work::Encode(self.encode));
        add(self.flat.is_empty(), Work::FlatEncode(self.flat));
        add(self.decode.is_empty(), Work::Decode(self.decode));
        add(self.round.is_empty(), Work::Round(self.round));
        add(self.transpose.is_empty(), Work::Transpose(self.transpose));
        add(self.repack.is_empty(), Work::Repack(self.repack));
        add(self.sums.is_empty(), Work::SumSquares(self.sums));
        CaseWork {
            work,
            bytes: self.bytes,
        }
    }
}

/// The block scales of a recipe that have a swizzled form: from Compact to it.
fn swizzle_layouts(recipe: &AnyRecipe, shape: Shape) -> Result<Vec<(ScaleLayout, ScaleLayout)>> {
    let mut layouts = Vec::new();
    for spec in recipe.buffers(Usage::BOTH) {
        if spec.key.part != Part::BlockScale {
            continue;
        }
        for orientation in spec.key.usage.orientations() {
            if let Ok(to) = ScaleLayout::new(&spec, shape, orientation, Form::Swizzled) {
                let from = ScaleLayout::new(&spec, shape, orientation, Form::Compact)?;
                layouts.push((from, to));
            }
        }
    }
    Ok(layouts)
}
