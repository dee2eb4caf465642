//! Jobs with mutated fields: planning rejects them with an error that names what is wrong, or the run
//! gives what the reference gives, and nothing outside the outputs changes.

use std::cell::Cell;

use lowp_format::{Extent, FormatError, Orientation};
use proptest::prelude::*;

use super::case::floats;
use super::fence::{Fence, Fenced};
use super::*;
use lowp_kernels::testing::Reads;
use lowp_kernels::{Element, GroupScalars};

mod arrays;
mod decode;
mod encode;
mod flat;
mod momentum;
mod round;
mod step_scalars;
mod sum;
mod update;
mod update_tiles;
mod vectors;

pub use arrays::{interleave_jobs, repack_jobs, transpose_jobs};
pub use decode::decode_jobs;
pub use encode::encode_jobs;
pub use flat::flat_encode_jobs;
pub use momentum::{momentum_jobs, normalize_jobs};
pub use round::round_jobs;
pub use step_scalars::step_scalars_jobs;
pub use sum::{add_jobs, add_parts_jobs, convert_jobs};
pub use update::update_jobs;
pub use update_tiles::updates_of_short_tiles;
pub use vectors::{amax_jobs, history_jobs, sum_jobs};

/// Random choices, and the buffers made so far.
struct Choices<'r, B: Backend> {
    rig: &'r Rig<B>,
    random: Philox,
    next: u64,
    /// Where buffers begin, if not anywhere.
    shift: Option<usize>,
    fences: Vec<Fence<'r>>,
}

impl<'r, B: Fenced> Choices<'r, B> {
    fn new(rig: &'r Rig<B>, seed: u64) -> Self {
        Self {
            rig,
            random: Philox::new(seed, 99),
            next: 0,
            shift: None,
            fences: Vec::new(),
        }
    }

    fn word(&mut self) -> u64 {
        self.next += 1;
        let [low, high, ..] = self.random.block(self.next);
        u64::from(low) | u64::from(high) << 32
    }

    fn below(&mut self, end: usize) -> usize {
        (self.word() % end.max(1) as u64) as usize
    }

    fn coin(&mut self) -> bool {
        self.below(2) == 0
    }

    fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())].clone()
    }

    /// A number that is near `now`, small, at the end of a machine's word, or beyond.
    fn size(&mut self, now: usize) -> usize {
        let near = [
            now.wrapping_sub(1),
            now.wrapping_add(1),
            now.wrapping_mul(2),
            now / 2,
            now.wrapping_add(1 << 32),
        ];
        let small = [0, 1, 2, 3, 5, 16, 31, 32, 33, 128];
        let large = [4096, 4097, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1];
        let largest = [1 << 32, 1 << 40, 1 << 48, 1 << 61, 1 << 63, usize::MAX];
        match self.below(4) {
            0 => self.pick(&near),
            1 => self.pick(&small),
            2 => self.pick(&large),
            _ => self.pick(&largest),
        }
    }

    fn float(&mut self) -> f32 {
        let bits = self.word() as u32;
        let some = [
            0.0,
            -0.0,
            1.0,
            -2.5,
            1e-40,
            3e38,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
            f32::from_bits(bits),
        ];
        self.pick(&some)
    }

    /// A buffer of `values` between fences.
    fn buffer<T: Element>(&mut self, values: &[T]) -> B::Buffer<T> {
        let any = self.pick(&[0, 0, 1, 4, 8]);
        let shift = self.shift.unwrap_or(any);
        let (buffer, fence) = B::fenced(self.rig, values, shift);
        self.fences.push(fence);
        buffer
    }

    fn bytes(&mut self, count: usize) -> B::Buffer<u8> {
        let bytes: Vec<u8> = (0..count).map(|_| self.word() as u8).collect();
        self.buffer(&bytes)
    }

    /// Ordinary values, and some of every other kind where `special`.
    fn floats(&mut self, count: usize, special: bool) -> B::Buffer<f32> {
        let seed = self.word();
        self.buffer(&values(count, seed, special))
    }

    fn halves(&mut self, count: usize, special: bool) -> B::Buffer<bf16> {
        let seed = self.word();
        let halves = values(count, seed, special).into_iter();
        self.buffer(&halves.map(bf16::from_f32).collect::<Vec<_>>())
    }

    fn source(&mut self, count: usize, special: bool) -> Source<B> {
        if self.coin() {
            Source::F32(self.floats(count, special))
        } else {
            Source::Bf16(self.halves(count, special))
        }
    }

    /// Amaxes as plans leave them: some consumed, some observed, and some that no plan leaves.
    fn amaxes(&mut self, count: usize) -> B::Buffer<f32> {
        let amax = |choices: &mut Self| match choices.below(8) {
            0 => choices.float(),
            1 => -(choices.below(100) as f32),
            _ => choices.below(1000) as f32 / 64.0,
        };
        let amaxes: Vec<f32> = (0..count).map(|_| amax(self)).collect();
        self.buffer(&amaxes)
    }

    fn rounding(&mut self) -> SourceRounding {
        self.pick(&[SourceRounding::F32, SourceRounding::ViaBf16])
    }

    /// A length that is a little wrong.
    fn length(&mut self, now: usize) -> usize {
        self.pick(&[0, now.saturating_sub(1), now + 1, 1, 2 * now])
    }

    /// Other bytes than those of `buffer`, of a length that is a little wrong.
    fn resized(&mut self, buffer: &B::Buffer<u8>) -> B::Buffer<u8> {
        let len = self.length(self.rig.backend.len::<u8>(buffer));
        self.bytes(len)
    }
}

/// What a buffer must hold after the run.
#[derive(Debug)]
enum Output<B: Backend> {
    Bytes(&'static str, B::Buffer<u8>, Vec<u8>),
    /// Scales or amaxes of the tensor or its lines: any NaN equals any other.
    Scale(B::Buffer<u8>, Vec<u8>),
    /// A sum of squares and a count; the sum may be NaN.
    Sum(B::Buffer<u8>, f64, u64),
    Floats(&'static str, B::Buffer<f32>, Vec<f32>),
    Halves(B::Buffer<bf16>, Vec<bf16>),
}

impl<B: Backend> Output<B> {
    /// Values that `into` holds, rounded to its dtype.
    fn of(what: &'static str, into: &Source<B>, values: Vec<f32>) -> Self {
        match into {
            Source::F32(buffer) => Output::Floats(what, buffer.clone(), values),
            Source::Bf16(buffer) => {
                let halves = values.into_iter().map(bf16::from_f32).collect();
                Output::Halves(buffer.clone(), halves)
            }
        }
    }

    fn assert(&self, rig: &Rig<B>, job: &str) {
        match self {
            Output::Bytes(what, buffer, expected) => {
                let found = rig.content::<u8>(buffer);
                let at = found.iter().zip(expected).position(|(a, b)| a != b);
                assert_eq!(at, None, "{what} of {job}");
                assert_eq!(found.len(), expected.len(), "{what} of {job}");
            }
            Output::Scale(buffer, expected) => {
                let found = floats(&rig.content::<u8>(buffer));
                assert_eq!(found, floats(expected), "{job}");
            }
            Output::Sum(buffer, expected, count) => {
                let found = rig.content::<u8>(buffer);
                let word = |at: usize| u64::from_le_bytes(found[at..at + 8].try_into().unwrap());
                let sum = f64::from_bits(word(0));
                let same = sum.to_bits() == expected.to_bits();
                assert!(same || sum.is_nan() && expected.is_nan(), "{sum}: {job}");
                assert_eq!(word(8), *count, "{job}");
            }
            Output::Floats(what, buffer, expected) => {
                let found = rig.content::<f32>(buffer);
                assert_eq!(bits(&found), bits(expected), "{what} of {job}");
            }
            Output::Halves(buffer, expected) => {
                let wide = |x: &[bf16]| x.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
                let found = wide(&rig.content::<bf16>(buffer));
                assert_eq!(bits(&found), bits(&wide(expected)), "{job}");
            }
        }
    }
}

/// A kind of job.
trait Mutate<B: Fenced>: Clone + std::fmt::Debug {
    /// A good job.
    fn good(choices: &mut Choices<'_, B>) -> Self;
    /// What can be mutated, as failures report it; what is mutated more often stands more than once.
    const FIELDS: &'static [&'static str];
    /// Mutates one of [`Mutate::FIELDS`].
    fn mutate(&mut self, field: &str, choices: &mut Choices<'_, B>);
    /// Gives its buffers the lengths that its fields ask for, where they are small.
    fn resize(&mut self, choices: &mut Choices<'_, B>);
    /// The job as work.
    fn work(self) -> Work<B>;
    /// What its outputs will be.
    fn expected(&self, rig: &Rig<B>) -> Vec<Output<B>>;
    /// The parameter group that it needs.
    fn group(&self) -> usize {
        0
    }
}

/// Lengths below which `resize` makes buffers.
const SMALL: usize = 1 << 16;

/// The product of `factors`, where it is small.
fn small(factors: &[usize]) -> Option<usize> {
    let product = factors.iter().try_fold(1usize, |a, &b| a.checked_mul(b));
    product.filter(|&n| n <= SMALL)
}

fn scalars() -> StepScalars {
    StepScalars {
        groups: vec![GroupScalars::default().at_step(3); 2],
        grad_scale: 0.5,
        random_step: 7,
        ..StepScalars::default()
    }
}

/// Scalars that equal [`scalars`] only where `reads` says that they are read.
fn no_more_than(reads: Reads) -> StepScalars {
    let mut given = scalars();
    if !reads.random {
        given.random_step = 0x0123_4567_89AB_CDEF;
    }
    if reads.groups == 0 {
        given.grad_scale = f32::NAN;
    }
    for group in given.groups.iter_mut().skip(reads.groups) {
        (group.lr, group.correction1) = (f32::NAN, 0.0);
    }
    StepScalars {
        skip: !reads.skip,
        max_norm: f32::NAN,
        ..given
    }
}

/// Whether the job of this case was run.
fn one<B: Fenced, J: Mutate<B>>(rig: &Rig<B>, seed: u64, picks: &[usize], resize: bool) -> bool {
    let mut choices = Choices::new(rig, seed);
    let mut job = J::good(&mut choices);
    let fields: Vec<_> = picks
        .iter()
        .map(|pick| J::FIELDS[pick % J::FIELDS.len()])
        .collect();
    for field in &fields {
        job.mutate(field, &mut choices);
    }
    if resize {
        job.resize(&mut choices);
    }
    let what = format!("{rig:?}, mutated {fields:?}: {job:?}");
    let plan = match rig.plan(job.clone().work()) {
        Ok(plan) => plan,
        Err(error) => {
            let of_the_machine = matches!(
                error,
                KernelError::Scalars { .. }
                    | KernelError::NoMemory { .. }
                    | KernelError::InCapture { .. }
                    | KernelError::CaptureLost
                    | KernelError::Threads { .. }
                    | KernelError::NoDevice { .. }
                    | KernelError::OtherDevice { .. }
                    | KernelError::Misaligned { .. }
                    | KernelError::Device { .. }
                    | KernelError::TooManyTiles { .. }
                    | KernelError::NotCompiled { .. }
                    | KernelError::Poisoned
            );
            assert!(!of_the_machine, "{error}: {what}");
            assert!(!picks.is_empty(), "a good job is rejected: {error}: {what}");
            choices.fences.iter().for_each(|fence| fence());
            return false;
        }
    };
    run_planned(&choices, &job, &plan, &what);
    true
}

/// Runs a planned job: its outputs are what the reference gives, and nothing around its buffers changes.
fn run_planned<B: Fenced, J: Mutate<B>>(
    choices: &Choices<'_, B>,
    job: &J,
    plan: &B::Plan,
    what: &str,
) {
    let rig = choices.rig;
    let given = no_more_than(Reads::of(&job.clone().work()));
    let outputs = if job.group() < given.groups.len() {
        job.expected(rig)
    } else {
        Vec::new()
    };
    let done = rig.backend.run(plan, &given);
    if job.group() < given.groups.len() {
        assert_eq!(done, Ok(()), "{what}");
    } else {
        assert!(matches!(done, Err(KernelError::Scalars { .. })), "{what}");
    }
    outputs.iter().for_each(|output| output.assert(rig, what));
    choices.fences.iter().for_each(|fence| fence());
}

/// Mutates jobs of one kind.
fn all<B: Fenced, J: Mutate<B>>(rig: &Rig<B>) {
    let (run, rejected) = (Cell::new(0), Cell::new(0));
    for seed in 0..24 {
        assert!(one::<B, J>(rig, seed, &[], false));
    }
    proptest!(cases_of(400), |(
        seed: u64, picks in prop::collection::vec(0usize..64, 1..4), resize: bool,
    )| {
        let count = if one::<B, J>(rig, seed, &picks, resize) { &run } else { &rejected };
        count.set(count.get() + 1);
    });
    // Else the test would see one side only.
    let counts = [run.get(), rejected.get()];
    assert!(counts.iter().all(|&n| n >= 20), "run, rejected: {counts:?}");
}

/// Codes with a scale per line.
fn case_of_lines() -> Case {
    let scale = ScaleRule::Current {
        extent: Extent::Line,
        pow2: false,
        epsilon: 0.0,
    };
    case(Code::E4M3, scale, None, Some(ROW_MAJOR))
}

/// Numbers at which a check that computes too narrowly, or not at all, lets work through.
pub fn sides_and_sums_that_overflow_are_rejected<B: Backend>(rig: &Rig<B>) {
    use lowp_kernels::{
        AmaxJob, BlockAmax, FlatBlocks, FlatEncodeJob, HistoryJob, InterleaveJob, PieceRows,
    };
    let rejected = |work: Work<B>| rig.plan(work).map(|_| ()).unwrap_err();
    let floats = |n: usize| rig.buffer(&vec![1f32; n]);
    let shape = Shape::new(4, 64);
    let part = |side, start| BlockAmax {
        block: [1, side],
        start,
    };
    let amax = |part: BlockAmax, shape| {
        Work::Amax(vec![AmaxJob {
            shape,
            start: 0,
            source: Source::F32(floats(256)),
            source_rounding: SourceRounding::F32,
            out: floats(64),
            tensor: None,
            blocks: vec![part],
            hadamard: false,
        }])
    };
    // A side as long as the matrix is that of a line, and of nothing else.
    assert!(rig.plan(amax(part(BufferSpec::WHOLE, 0), shape)).is_ok());
    for block in [[BufferSpec::WHOLE; 2], [2, BufferSpec::WHOLE]] {
        let error = rejected(amax(BlockAmax { block, start: 0 }, shape));
        assert!(error.to_string().contains("1 to 4096"), "{error}");
    }
    for side in [0, 4097, 1 << 32, usize::MAX - 1] {
        let error = rejected(amax(part(side, 0), shape));
        assert!(error.to_string().contains("1 to 4096"), "{error}");
    }
    let error = rejected(amax(part(32, usize::MAX), shape));
    assert!(matches!(error, KernelError::Range { len: 64, .. }));
    let huge = Shape::new(1 << 32, 1 << 32);
    let error = rejected(amax(part(32, 0), huge));
    assert!(matches!(
        error,
        KernelError::Format(FormatError::TooLarge { .. })
    ));

    let flat = |parts: &[BlockAmax]| {
        let case = case(
            Code::E4M3,
            ScaleRule::E8M0(MxScale::Te),
            Some([[1, 32], [32, 1]]),
            Some(ROW_MAJOR),
        );
        Work::FlatEncode(vec![FlatEncodeJob {
            shape,
            start: 0,
            len: 256,
            kernels: case.kernels(),
            source: Source::F32(floats(256)),
            source_rounding: SourceRounding::F32,
            tensor: [None, None],
            blocks: Some(FlatBlocks {
                amaxes: floats(8),
                blocks: parts.to_vec(),
            }),
            targets: vec![Target::new(case.specs()[0], rig.buffer(&[0u8; 256]))],
        }])
    };
    assert!(rig.plan(flat(&[part(32, 0)])).is_ok());
    let error = rejected(flat(&[part(32, 0), part(1 << 32, 0)]));
    assert!(error.to_string().contains("1 to 4096"), "{error}");
    // The second of two vectors of one block is consumed, so it must exist, and say which is meant.
    let error = rejected(flat(&[part(32, 0), part(32, 7)]));
    assert!(matches!(error, KernelError::Range { len: 8, .. }));
    let error = rejected(flat(&[part(32, 0), part(32, 0)]));
    assert!(error.to_string().contains("two vectors"), "{error}");

    // Lines have amaxes, but no scales of blocks.
    let line = BufferSpec::WHOLE;
    let scale = ScaleRule::E8M0(MxScale::Te);
    let lines = case(
        Code::E4M3,
        scale,
        Some([[1, line], [line, 1]]),
        Some(ROW_MAJOR),
    );
    let outer = lines.outer(shape, 2.0);
    let source = Source::F32(floats(256));
    let error = rejected(Work::Encode(vec![encode_job(
        rig,
        &lines,
        &lines.specs(),
        shape,
        source,
        &outer,
    )]));
    assert!(error.to_string().contains("1 to 4096"), "{error}");
    // A slot of no entries lies in its vector, too.
    let rows = case_of_lines();
    let none = Shape::new(0, 64);
    let outer = rows.outer(none, 2.0);
    let source = Source::F32(floats(0));
    let mut job = encode_job(rig, &rows, &rows.specs(), none, source, &outer);
    job.tensor[0] = Some(TensorInput::Known(Slot {
        buffer: floats(2),
        index: 3,
    }));
    let error = rejected(Work::Encode(vec![job]));
    assert!(
        matches!(error, KernelError::Range { start: 3, .. }),
        "{error}"
    );

    for margin in [i32::MIN, -65, 65, i32::MAX] {
        let error = rejected(Work::History(vec![HistoryJob {
            observed: floats(1),
            scales: floats(1),
            index: 0,
            history: floats(2),
            algorithm: lowp_format::AmaxAlgorithm::Max,
            margin,
            element: Code::E4M3,
        }]));
        assert!(error.to_string().contains("-64 to 64"), "{error}");
    }
    for (outer, widths) in [
        (1, vec![usize::MAX, 2]),
        (usize::MAX, vec![2]),
        (0, vec![1 << 63, 1 << 63]),
    ] {
        let error = rejected(Work::Interleave(vec![InterleaveJob {
            outer,
            pieces: PieceRows::dense(outer, widths),
            from: rig.buffer(&[0u8; 1]),
            to: rig.buffer(&[0u8; 1]),
        }]));
        assert!(matches!(error, KernelError::Format(_)), "{error}");
    }
}

/// A matrix without columns has rows that nobody counts one by one, but for those that have an entry each.
pub fn what_is_stated_is_not_allocated<B: Backend>(rig: &Rig<B>) {
    use super::decode::decode_job;
    use super::flat::{blocks_of, flat_specs, flat_usage};
    use lowp_kernels::{FlatBlocks, FlatEncodeJob};
    for case in cases() {
        let lines = |key: &KernelKey| matches!(key.scale.outer(), Some((Extent::Line, _)));
        let many = if case.kernels().iter().any(lines) {
            1 << 10
        } else {
            1 << 40
        };
        for shape in [Shape::new(many, 0), Shape::new(0, many)] {
            let source = || Source::F32(rig.buffer::<f32>(&[]));
            let outer = case.outer(shape, 2.0);
            let job = encode_job(rig, &case, &case.specs(), shape, source(), &outer);
            rig.run(Work::Encode(vec![job.clone()]));
            for target in job.targets.iter().filter(|t| !t.spec.key.part.is_outer()) {
                assert!(rig.content::<u8>(&target.bytes).is_empty());
            }
            for orientation in Orientation::ALL {
                let decode = decode_job(rig, &job, orientation, FloatDtype::F32).unwrap();
                rig.run(Work::Decode(vec![decode]));
            }
            let specs = flat_specs(&case);
            let row_major = |t: &&Target<B>| specs.contains(&t.spec);
            rig.run(Work::FlatEncode(vec![FlatEncodeJob {
                shape,
                start: 0,
                len: 0,
                kernels: case.kernels(),
                source: source(),
                source_rounding: SourceRounding::F32,
                tensor: job.tensor.clone(),
                blocks: Some(FlatBlocks {
                    amaxes: rig.buffer(&[0f32]),
                    blocks: blocks_of(&case, shape, flat_usage(&case)).0,
                }),
                targets: job.targets.iter().filter(row_major).cloned().collect(),
            }]));
        }
    }
}
