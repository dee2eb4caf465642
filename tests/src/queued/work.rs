//! The jobs of a [`Queued`] handle as jobs of the CPU: the same buffers under another type.

use lowp_kernels::{
    AmaxJob, ConvertJob, Cpu, DecodeJob, EncodeJob, FlatBlocks, FlatEncodeJob, HistoryJob,
    InterleaveJob, Master, MomentumJob, NormalizeJob, OwnPart, RearrangeJob, Rearranged, RepackJob,
    RoundJob, Slot, Source, State, StepScalarsJob, SumJob, SumPartsJob, SumSquaresJob, Target,
    TensorInput, TransposeJob, UpdateAmax, UpdateJob, Work,
};

use super::Queued;

/// The same work for the CPU.
pub(super) fn on_cpu(work: Work<Queued>) -> Work<Cpu> {
    fn all<T, U>(jobs: Vec<T>, f: fn(T) -> U) -> Vec<U> {
        jobs.into_iter().map(f).collect()
    }
    match work {
        Work::Amax(jobs) => Work::Amax(all(jobs, amax)),
        Work::History(jobs) => Work::History(all(jobs, history)),
        Work::Encode(jobs) => Work::Encode(all(jobs, encode)),
        Work::FlatEncode(jobs) => Work::FlatEncode(all(jobs, flat)),
        Work::Decode(jobs) => Work::Decode(all(jobs, decode)),
        Work::Round(jobs) => Work::Round(all(jobs, |job| RoundJob {
            encode: encode(job.encode),
            values: job.values,
        })),
        Work::Transpose(jobs) => Work::Transpose(all(jobs, |job| TransposeJob {
            code: job.code,
            entries: job.entries,
            from: job.from,
            to: job.to,
        })),
        Work::Repack(jobs) => Work::Repack(all(jobs, |job| RepackJob {
            from_layout: job.from_layout,
            to_layout: job.to_layout,
            from: job.from,
            to: job.to,
        })),
        Work::Interleave(jobs) => Work::Interleave(all(jobs, |job| InterleaveJob {
            outer: job.outer,
            pieces: job.pieces,
            from: job.from,
            to: job.to,
        })),
        Work::Rearrange(jobs) => Work::Rearrange(all(jobs, |job| RearrangeJob {
            copies: job.copies,
            buffers: match job.buffers {
                Rearranged::Bytes(buffers) => Rearranged::Bytes(buffers),
                Rearranged::F32(buffers) => Rearranged::F32(buffers),
                Rearranged::Bf16(buffers) => Rearranged::Bf16(buffers),
            },
        })),
        Work::Update(jobs) => Work::Update(all(jobs, update)),
        Work::SumSquares(jobs) => Work::SumSquares(all(jobs, |job| SumSquaresJob {
            source: source(job.source),
            out: job.out,
        })),
        Work::Sum(jobs) => Work::Sum(all(jobs, |job| SumJob {
            from: source(job.from),
            into: source(job.into),
        })),
        Work::SumParts(jobs) => Work::SumParts(all(jobs, |job| SumPartsJob {
            parts: source(job.parts),
            count: job.count,
            own: job.own.map(|own| OwnPart {
                number: own.number,
                values: source(own.values),
            }),
            into: job.into,
            accumulate: job.accumulate,
        })),
        Work::Convert(jobs) => Work::Convert(all(jobs, |job| ConvertJob {
            from: source(job.from),
            into: source(job.into),
        })),
        Work::Momentum(jobs) => Work::Momentum(all(jobs, |job| MomentumJob {
            grad: source(job.grad),
            momentum: job.momentum,
            out: job.out,
            group: job.group,
        })),
        Work::Normalize(jobs) => Work::Normalize(all(jobs, |job| NormalizeJob {
            from: job.from,
            sum: job.sum,
            out: job.out,
        })),
        Work::StepScalars(jobs) => Work::StepScalars(all(jobs, |job| StepScalarsJob {
            parts: job.parts,
            shards: job.shards,
            replica: job.replica,
            options: job.options,
            counts: job.counts,
            out: job.out,
            report: job.report,
        })),
    }
}

fn source(source: Source<Queued>) -> Source<Cpu> {
    match source {
        Source::F32(buffer) => Source::F32(buffer),
        Source::Bf16(buffer) => Source::Bf16(buffer),
    }
}

fn state(state: State<Queued>) -> State<Cpu> {
    match state {
        State::Values(values) => State::Values(source(values)),
        State::Fp8(bytes) => State::Fp8(bytes),
    }
}

fn slot(slot: Slot<Queued>) -> Slot<Cpu> {
    let Slot { buffer, index } = slot;
    Slot { buffer, index }
}

fn tensor(input: TensorInput<Queued>) -> TensorInput<Cpu> {
    match input {
        TensorInput::Known(at) => TensorInput::Known(slot(at)),
        TensorInput::Observed(at) => TensorInput::Observed(slot(at)),
    }
}

fn target(target: Target<Queued>) -> Target<Cpu> {
    match target.form {
        None => Target::new(target.spec, target.bytes),
        Some((form, orientation)) => Target::in_form(target.spec, form, orientation, target.bytes),
    }
}

fn amax(job: AmaxJob<Queued>) -> AmaxJob<Cpu> {
    AmaxJob {
        shape: job.shape,
        start: job.start,
        source: source(job.source),
        source_rounding: job.source_rounding,
        out: job.out,
        tensor: job.tensor,
        blocks: job.blocks,
        hadamard: job.hadamard,
    }
}

fn history(job: HistoryJob<Queued>) -> HistoryJob<Cpu> {
    HistoryJob {
        observed: job.observed,
        scales: job.scales,
        index: job.index,
        history: job.history,
        algorithm: job.algorithm,
        margin: job.margin,
        element: job.element,
    }
}

fn encode(job: EncodeJob<Queued>) -> EncodeJob<Cpu> {
    EncodeJob {
        shape: job.shape,
        kernels: job.kernels,
        source: source(job.source),
        source_rounding: job.source_rounding,
        tensor: job.tensor.map(|input| input.map(tensor)),
        targets: job.targets.into_iter().map(target).collect(),
        stochastic: job.stochastic,
    }
}

fn flat(job: FlatEncodeJob<Queued>) -> FlatEncodeJob<Cpu> {
    FlatEncodeJob {
        shape: job.shape,
        start: job.start,
        len: job.len,
        kernels: job.kernels,
        source: source(job.source),
        source_rounding: job.source_rounding,
        tensor: job.tensor.map(|input| input.map(tensor)),
        blocks: job.blocks.map(|blocks| FlatBlocks {
            amaxes: blocks.amaxes,
            blocks: blocks.blocks,
        }),
        targets: job.targets.into_iter().map(target).collect(),
    }
}

fn decode(job: DecodeJob<Queued>) -> DecodeJob<Cpu> {
    DecodeJob {
        shape: job.shape,
        kernel: job.kernel,
        data: target(job.data),
        block_scale: job.block_scale.map(target),
        tensor_scale: job.tensor_scale,
        out: source(job.out),
    }
}

fn update(job: UpdateJob<Queued>) -> UpdateJob<Cpu> {
    UpdateJob {
        master: match job.master {
            Master::Values(values) => source(values).into(),
            Master::Bf16Plus16 {
                parameter,
                remainder,
            } => Master::Bf16Plus16 {
                parameter,
                remainder,
            },
        },
        states: job.states.into_iter().map(state).collect(),
        random: job.random,
        grad: source(job.grad),
        group: job.group,
        rule: job.rule,
        source_rounding: job.source_rounding,
        amax: job.amax.map(|amax| UpdateAmax {
            shape: amax.shape,
            out: amax.out,
            tensor: amax.tensor,
            lines: amax.lines,
        }),
        encode: job.encode.map(|job| Box::new(encode(*job))),
    }
}
