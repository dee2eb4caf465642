//! Ranks that agree on amaxes by NCCL, between the two launches of a step and on their stream.

#![expect(unsafe_code, reason = "calls NCCL on the stream and memory of plans")]

use std::mem::MaybeUninit;

use cudarc::driver::sys::CUstream;
use cudarc::nccl::{result as nccl, sys};

use super::rig::device;
use super::*;
use lowp_kernels::{Cpu, Cuda, CudaBuffer, GroupScalars, Rule, UpdateAmax, UpdateJob};

/// Rows of the two tensors that each of two ranks has: uneven ones, and none.
const ROWS: [[usize; 2]; 2] = [[96, 0], [64, 48]];
const COLS: usize = 320;
const STEPS: u64 = 4;

/// A tensor, whole or one rank's rows of it: an update that observes, and the encode that follows.
struct Tensor<B: Backend> {
    update: UpdateJob<B>,
    encode: EncodeJob<B>,
}

impl<B: Backend> Tensor<B> {
    /// Rows `rows` of tensor `index`, whose amax is entry `index` of `observed`.
    fn new(
        rig: &Rig<B>,
        index: usize,
        rows: std::ops::Range<usize>,
        observed: &B::Buffer<f32>,
    ) -> Self {
        let blocks = Some([[1, 16], [16, 1]]);
        let case = [
            case(Code::E4M3, CURRENT, None, Some(TRANSPOSED)),
            case(Code::E2M1, ScaleRule::TWO_LEVEL, blocks, Some(ROW_MAJOR)),
        ][index];
        let all: usize = ROWS.iter().map(|rank| rank[index]).sum();
        let part = |seed: u64| {
            let values = values(all * COLS, seed + index as u64, false);
            values[rows.start * COLS..rows.end * COLS].to_vec()
        };
        let shape = Shape::new(rows.len(), COLS);
        let master = rig.buffer(&part(60));
        let [exp_avg, exp_avg_sq] = [0, 0].map(|_| rig.buffer(&vec![0f32; shape.elements()]));
        let slot = Slot {
            buffer: observed.clone(),
            index,
        };
        let specs = case.of_usage(Usage::ROWWISE);
        let source = Source::F32(master.clone());
        let outer = case.outer(shape, 0.0);
        let encode = encode_job(rig, &case, &specs, shape, source, &outer);
        Self {
            update: UpdateJob {
                master: Source::F32(master).into(),
                states: vec![Source::F32(exp_avg).into(), Source::F32(exp_avg_sq).into()],
                grad: source_of(rig, &part(70)),
                group: 0,
                random: None,
                rule: Rule::AdamW,
                source_rounding: SourceRounding::F32,
                amax: Some(UpdateAmax::of_tensor(slot.clone())),
                encode: None,
            },
            encode: EncodeJob {
                tensor: [(); 2].map(|()| Some(TensorInput::Observed(slot.clone()))),
                ..encode
            },
        }
    }
}

fn source_of<B: Backend>(rig: &Rig<B>, values: &[f32]) -> Source<B> {
    source(rig, values, true).0
}

/// The rows of `rank` of tensor `index`.
fn rows(rank: usize, index: usize) -> std::ops::Range<usize> {
    let first: usize = ROWS[..rank].iter().map(|rank| rank[index]).sum();
    first..first + ROWS[rank][index]
}

fn work<B: Backend>(tensors: &[Tensor<B>]) -> [Work<B>; 2] {
    [
        Work::Update(tensors.iter().map(|t| t.update.clone()).collect()),
        Work::Encode(tensors.iter().map(|t| t.encode.clone()).collect()),
    ]
}

/// A rate that shrinks the masters: an amax that stays from an earlier step would be too large.
fn scalars(step: u64) -> StepScalars {
    let group = GroupScalars {
        lr: 0.2,
        weight_decay: 1.0,
        ..GroupScalars::default()
    };
    StepScalars {
        groups: vec![group.at_step(step)],
        ..StepScalars::default()
    }
}

type Contents = Vec<Vec<(BufferKey, Vec<u8>)>>;

/// Both tensors whole, after all steps.
fn alone() -> Contents {
    let rig = super::rig::cpu::best();
    let observed = rig.buffer(&[0f32; 2]);
    let whole = |index| 0..ROWS.iter().map(|rank| rank[index]).sum();
    let tensors: Vec<Tensor<Cpu>> = (0..2)
        .map(|index| Tensor::new(&rig, index, whole(index), &observed))
        .collect();
    let plans = work(&tensors).map(|work| rig.plan(work).unwrap());
    for step in 1..=STEPS {
        for plan in &plans {
            rig.backend.run(plan, &scalars(step)).unwrap();
        }
    }
    let targets = |tensor: &Tensor<Cpu>| contents(&rig, &tensor.encode.targets);
    tensors.iter().map(targets).collect()
}

/// The same of one rank, in two launches and a collective per step, captured once.
fn ranked(rig: &Rig<Cuda>, rank: usize, world: usize, id: sys::ncclUniqueId) -> Contents {
    let observed: CudaBuffer<f32> = rig.buffer(&[0f32; 2]);
    let tensors: Vec<Tensor<Cuda>> = (0..2)
        .map(|index| Tensor::new(rig, index, rows(rank, index), &observed))
        .collect();
    let plans = work(&tensors).map(|work| rig.plan(work).unwrap());
    // Makes the device current on this thread.
    rig.backend.synchronize().unwrap();
    let mut comm = MaybeUninit::uninit();
    let [ranks, number] = [world, rank].map(|n| i32::try_from(n).unwrap());
    // SAFETY: NCCL fills the handle; every rank calls with the same id.
    let comm = unsafe {
        nccl::comm_init_rank(comm.as_mut_ptr(), ranks, id, number).unwrap();
        comm.assume_init()
    };
    let agree = |stream: u64| {
        let amaxes = observed.pointer() as *mut _;
        let (float, max) = (sys::ncclDataType_t::ncclFloat32, sys::ncclRedOp_t::ncclMax);
        // SAFETY: both entries are there as long as the handle of their buffer, which outlives the
        // stream's work and the graph.
        unsafe { nccl::all_reduce(amaxes, amaxes, 2, float, max, comm, stream as CUstream as _) }
            .map(|_| ())
            .map_err(|error| KernelError::Device {
                call: "ncclAllReduce",
                why: format!("{error:?}"),
            })
    };
    // Connects the ranks, which cannot be done while work is recorded.
    agree(rig.backend.stream().unwrap()).unwrap();
    let device = rig.buffer(&scalars(1).to_bytes());
    let graph = rig.backend.capture(|| {
        rig.backend.run_with(&plans[0], &device)?;
        agree(rig.backend.stream()?)?;
        rig.backend.run_with(&plans[1], &device)
    });
    let graph = graph.unwrap();
    for step in 1..=STEPS {
        let scalars = scalars(step).to_bytes();
        rig.backend.write::<u8>(&device, 0, &scalars).unwrap();
        rig.backend.launch(&graph).unwrap();
    }
    rig.backend.synchronize().unwrap();
    let consumed = rig.content::<f32>(&observed);
    assert!(
        consumed.iter().all(|x| x.is_sign_negative()),
        "{consumed:?}"
    );
    drop(graph);
    // SAFETY: the last use of the handle.
    unsafe { nccl::comm_destroy(comm).unwrap() };
    let targets = |tensor: &Tensor<Cuda>| contents(rig, &tensor.encode.targets);
    tensors.iter().map(targets).collect()
}

#[test]
fn two_launches_and_a_collective_make_a_step() {
    device::pair(|rigs| {
        // SAFETY: looks for the library.
        if !unsafe { sys::is_culib_present() } {
            return device::pass_over(&"there is no NCCL; put its folder on LD_LIBRARY_PATH");
        }
        let id = nccl::get_uniqueid().unwrap();
        let found: Vec<Contents> = std::thread::scope(|scope| {
            let run = |(rank, rig)| scope.spawn(move || ranked(rig, rank, rigs.len(), id));
            let ranks: Vec<_> = rigs.iter().enumerate().map(run).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        for (index, whole) in alone().into_iter().enumerate() {
            for (at, (key, expected)) in whole.into_iter().enumerate() {
                let parts = found.iter().map(|rank| rank[index][at].1.clone());
                if key.part.is_outer() {
                    for part in parts {
                        assert_eq!(part, expected, "{key}");
                    }
                } else {
                    assert!(parts.collect::<Vec<_>>().concat() == expected, "{key}");
                }
            }
        }
    });
}
