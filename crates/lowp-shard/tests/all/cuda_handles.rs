//! Ranks with a stream each on one GPU: what a collective reads was written, and is read before it
//! changes, though nothing but the collective orders the streams. Without a GPU they pass, unless
//! `LOWP_REQUIRE_GPU` is set. Only with the feature `cuda`.
#![cfg(feature = "cuda")]

use crate::common::{PATIENCE, values};
use lowp_comm::{GatherItem, GradWire, ReduceItem, run_ranks_on};
use lowp_format::{AnyRecipe, QuantizedTensor, Shape, Usage};
use lowp_kernels::{Backend, Cpu, Cuda, Source};
use lowp_shard::{FlatMaster, ShardError, bucket_bytes, cast_master_weights, move_into, quantize};

const RANKS: usize = 3;
/// Bytes of a piece: a copy takes much longer than the call that starts it.
const LEN: usize = 1 << 26;
/// Copies that a rank's stream has to do yet when the collective begins, and rank `n` has `n + 1` times as many.
const COPIES: usize = 40;
const STEPS: usize = 4;

/// A stream for each rank.
fn handles() -> Option<Vec<Cuda>> {
    let fork = |cuda: Cuda| {
        (0..RANKS)
            .map(|_| cuda.fork())
            .collect::<Result<Vec<_>, _>>()
    };
    match Cuda::new(0).and_then(fork) {
        Ok(handles) => Some(handles),
        Err(error) if std::env::var_os("LOWP_REQUIRE_GPU").is_some() => {
            panic!("LOWP_REQUIRE_GPU is set, but {error}")
        }
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

#[test]
fn cuda_gathers_follow_the_streams_of_all_ranks() {
    let Some(backends) = handles() else { return };
    let run = run_ranks_on(&backends, PATIENCE, |rank, comm| -> Result<_, ShardError> {
        let backend = &backends[rank];
        let ranges: Vec<_> = (0..RANKS).map(|r| r * LEN..(r + 1) * LEN).collect();
        let (source, dest) = (backend.alloc::<u8>(LEN)?, backend.alloc::<u8>(RANKS * LEN)?);
        let zeros = backend.alloc::<u8>(LEN)?;
        let mut seen = Vec::new();
        for step in 0..STEPS {
            let value = backend.upload(&vec![(10 * step + rank + 1) as u8; LEN])?;
            // The last of many copies is the one that counts.
            for _ in 0..COPIES * (1 + rank) {
                backend.copy(&zeros, 0..LEN, &source, 0)?;
            }
            backend.copy(&value, 0..LEN, &source, 0)?;
            comm.all_gather(&[GatherItem {
                source: &source,
                dest: &dest,
                ranges: &ranges,
            }])?;
            // At once, while the others may not have copied.
            backend.clear(&source)?;
            let all = backend.download(&dest)?;
            let piece = |r: usize| {
                let first = all[r * LEN];
                (
                    first,
                    all[r * LEN..(r + 1) * LEN].iter().all(|&x| x == first),
                )
            };
            seen.push((0..RANKS).map(piece).collect::<Vec<_>>());
        }
        Ok(seen)
    });
    for seen in run.unwrap_or_else(|e| panic!("{e}")) {
        for (step, pieces) in seen.into_iter().enumerate() {
            let expected = (0..RANKS).map(|rank| ((10 * step + rank + 1) as u8, true));
            assert_eq!(pieces, expected.collect::<Vec<_>>(), "step {step}");
        }
    }
}

#[test]
fn cuda_reductions_follow_the_streams_of_all_ranks() {
    let Some(backends) = handles() else { return };
    let len = LEN / 16;
    let run = run_ranks_on(&backends, PATIENCE, |rank, comm| -> Result<_, ShardError> {
        let backend = &backends[rank];
        let ranges: Vec<_> = (0..RANKS).map(|r| r * len..(r + 1) * len).collect();
        let value = backend.upload(&vec![rank as f32 + 1.0; RANKS * len])?;
        let zeros = backend.alloc::<f32>(RANKS * len)?;
        let [grad, most] = [(); 2].map(|()| backend.alloc::<f32>(RANKS * len));
        let (grad, most, out) = (grad?, most?, backend.alloc::<f32>(len)?);
        for to in [&grad, &most] {
            for _ in 0..COPIES * (1 + rank) {
                backend.copy(&zeros, 0..RANKS * len, to, 0)?;
            }
            backend.copy(&value, 0..RANKS * len, to, 0)?;
        }
        let item = ReduceItem {
            grad: &Source::F32(grad.clone()),
            memory: 0,
            ranges: &ranges,
            out: &out,
            accumulate: false,
        };
        comm.reduce_scatter(&[item], GradWire::F32)?;
        backend.clear(&grad)?;
        comm.all_reduce_max(&most)?;
        Ok([backend.download(&out)?, backend.download(&most)?])
    });
    for [out, most] in run.unwrap_or_else(|e| panic!("{e}")) {
        assert!(out.iter().all(|&x| x == 6.0));
        assert!(most.iter().all(|&x| x == 3.0));
    }
}

/// Full weights of every recipe, cut through rows, blocks and bytes, in one bucket per rank.
#[test]
fn cuda_flat_weights_have_the_bytes_of_the_cpu() {
    let Some(backends) = handles() else { return };
    let shape = Shape::new(133, 192);
    let ends = [8_191, 20_001, shape.elements()];
    let source = |seed| values(seed, shape.elements());
    for usage in [Usage::ROWWISE, Usage::COLUMNWISE, Usage::BOTH] {
        let recipes = || (0..).zip(AnyRecipe::all());
        let run = run_ranks_on(&backends, PATIENCE, |rank, comm| -> Result<_, ShardError> {
            let backend = &backends[rank];
            let own = rank.checked_sub(1).map_or(0, |before| ends[before])..ends[rank];
            let mut tensors = Vec::new();
            for (_, recipe) in recipes() {
                tensors.push(QuantizedTensor::new(recipe, shape, usage, |_, bytes| {
                    Ok::<_, ShardError>(backend.alloc::<u8>(bytes)?)
                })?);
            }
            let bucket = backend.alloc::<u8>(tensors.iter().map(bucket_bytes).sum())?;
            let mut offset = 0;
            for tensor in &mut tensors {
                *tensor = move_into(backend, tensor, &bucket, offset)?;
                offset += bucket_bytes(tensor);
            }
            let mut weights = Vec::new();
            for (seed, tensor) in (0..).zip(&tensors) {
                let master = Source::F32(backend.upload(&source(seed)[own.clone()])?);
                let start = own.start;
                weights.push(FlatMaster {
                    tensor,
                    start,
                    master,
                });
            }
            cast_master_weights(backend, &comm, &weights)?;
            let buffers = tensors.iter().flat_map(|t| t.buffers());
            let bytes = buffers.map(|b| backend.download(&b.storage));
            Ok(bytes.collect::<Result<Vec<_>, _>>()?)
        });
        let mut expected = Vec::new();
        for (seed, recipe) in recipes() {
            let source = Source::F32(Cpu.upload(&source(seed)).expect("memory"));
            let whole = quantize(&Cpu, recipe, shape, usage, source, None).expect("quantized");
            for buffer in whole.buffers() {
                expected.push(Cpu.download(&buffer.storage).expect("bytes"));
            }
        }
        for found in run.unwrap_or_else(|e| panic!("{usage}: {e}")) {
            assert!(found == expected, "{usage}");
        }
    }
}
