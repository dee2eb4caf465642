//! The audit has teeth: defects that no shape check sees are planted, and each is caught.

use std::sync::Arc;

use lowp_comm::{LocalComm, run_ranks};
use lowp_format::{AnyRecipe, Code, Orientation, Part, Phase, Recipe, Shape, Usage};
use lowp_kernels::{Backend, Cpu, Source};
use lowp_optim::{Group, OptimError, OptimizerBuilder, ParamSpec, StepOptions};
use lowp_shard::{
    CastItem, CastPlan, Divergence, GatherGroup, GatherPool, ScaleBookBuilder, ShardError,
    ShardSpec, ShardedTensor, audit, quantize,
};
use lowp_tests::model::{is_delayed, observes_amax};
use lowp_tests::values::Family;
use lowp_tests::world::{TIMEOUT, orientation};

/// Every rank has rows, also of recipes with blocks of 128.
const SHAPE: Shape = Shape::new(384, 128);
const RANKS: usize = 3;

/// What is done to the model before it is audited.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Defect {
    None,
    /// One scale is twice what its codes were written with.
    ScaleOffByOneBinade,
    /// The full columnwise tensor of before the update is used after it.
    StaleColumnwise,
    /// The last rank casts its rows with the amax of its rows alone.
    OwnTensorScale,
}

/// Values whose last rows are small, so that ranks see different amaxes.
fn values() -> Vec<f32> {
    let mut values = Family::Normal.values(11, SHAPE.elements());
    let small = SHAPE.elements() * 2 / 3;
    values[small..].iter_mut().for_each(|v| *v *= 0.3);
    values
}

/// Trains two steps on every rank, plants the defect, and audits what each rank gathers.
fn audited(recipe: AnyRecipe, defect: Defect) -> Vec<Option<Divergence>> {
    let cpu = Cpu;
    run_ranks(
        &cpu,
        RANKS,
        TIMEOUT,
        |rank, comm| -> Result<_, OptimError> {
            let spec = ShardSpec::new(&recipe, SHAPE, RANKS, rank)?;
            let (own, all) = (spec.elements(), spec.all_elements());
            let shard = ShardedTensor::new(&cpu, recipe, spec)?;
            let mut builder = OptimizerBuilder::new(comm.clone());
            let group = builder.group(Group {
                lr: 0.05,
                ..Group::default()
            });
            let param = ParamSpec::new("weight", group, values()[own.clone()].to_vec());
            let id = builder.param(shard.local(), param)?;
            let mut optimizer = builder.build()?;
            let pool = Arc::new(GatherPool::new(&cpu));
            let reshard = defect != Defect::StaleColumnwise;
            let mut gathered =
                GatherGroup::new(&cpu, comm.clone(), &pool, vec![shard.clone()], reshard)?;
            let mut stale = None;
            for step in 0..2 {
                if defect == Defect::StaleColumnwise {
                    gathered.unshard(Phase::Forward)?;
                    gathered.unshard(Phase::Backward)?;
                    // The group rejects it after the step; its buffers are still there.
                    stale = Some(gathered.tensor(0)?.clone());
                }
                let grad = Family::Normal.values(20 + step, SHAPE.elements());
                optimizer.set_grad(id, &grad[own.clone()])?;
                optimizer.step(&StepOptions::default())?.wait()?;
            }
            let master = optimizer.master(id)?;
            match defect {
                Defect::ScaleOffByOneBinade => double_a_scale(&cpu, &shard),
                Defect::OwnTensorScale if rank + 1 == RANKS => cast_alone(&cpu, &shard, &master)?,
                _ => {}
            }
            let mut sums = vec![0.0f64; SHAPE.elements()];
            for (sum, value) in sums[all[rank].clone()].iter_mut().zip(&master) {
                *sum = f64::from(*value);
            }
            comm.control().sum(&mut sums)?;
            let full: Vec<f32> = sums.iter().map(|&v| v as f32).collect();
            let full = cpu.upload(&full)?;
            if let Some(stale) = stale {
                let param = 0;
                assert_eq!(
                    gathered.tensor(param).err(),
                    Some(ShardError::Stale { param })
                );
                return Ok(audit(&cpu, &stale, Orientation::Columnwise, &full)?);
            }
            let mut found = None;
            for phase in Phase::ALL.into_iter().rev() {
                gathered.unshard(phase)?;
                let divergence = audit(&cpu, gathered.tensor(0)?, orientation(phase), &full)?;
                found = found.or(divergence);
                gathered.release();
            }
            Ok(found)
        },
    )
    .unwrap_or_else(|e| panic!("{} {defect:?}: {e}", recipe.name()))
}

/// Doubles the first scale of the shard, whatever its code is.
fn double_a_scale(cpu: &Cpu, shard: &ShardedTensor<Cpu>) {
    let local = shard.local();
    let scale = local
        .part(Orientation::Rowwise, Part::BlockScale)
        .or_else(|| local.outer(Orientation::Rowwise))
        .expect("a scale");
    let mut bytes = cpu.download(&scale.storage).expect("bytes");
    match scale.spec.code {
        Code::E8M0 => bytes[0] += 1,
        Code::E4M3 => {
            bytes[0] = if bytes[0] >= 0x78 {
                bytes[0] - 8
            } else {
                bytes[0] + 8
            }
        }
        Code::F32 => {
            let value = f32::from_le_bytes(bytes[..4].try_into().expect("one f32"));
            bytes[..4].copy_from_slice(&(2.0 * value).to_le_bytes());
        }
        other => panic!("no scale is stored as {other}"),
    }
    cpu.write(&scale.storage, 0, &bytes).expect("room");
}

/// Casts a shard with scales from its own rows.
fn cast_alone(cpu: &Cpu, shard: &ShardedTensor<Cpu>, rows: &[f32]) -> Result<(), ShardError> {
    let mut book = ScaleBookBuilder::default();
    let item = CastItem::rows(shard.local(), Source::F32(cpu.upload(rows)?), &mut book);
    let book = book.build(cpu)?;
    CastPlan::new(cpu, &book, &[item])?.calibrate(&book, &LocalComm::solo(cpu))
}

#[test]
fn a_sound_model_passes() {
    for recipe in AnyRecipe::all() {
        assert_eq!(
            audited(recipe, Defect::None),
            [None; RANKS],
            "{}",
            recipe.name()
        );
    }
}

#[test]
fn a_scale_off_by_one_binade_is_caught() {
    for recipe in AnyRecipe::low_precision() {
        for found in audited(recipe, Defect::ScaleOffByOneBinade) {
            assert!(found.is_some(), "{}", recipe.name());
        }
    }
}

#[test]
fn a_stale_columnwise_copy_is_caught() {
    for recipe in AnyRecipe::all() {
        for found in audited(recipe, Defect::StaleColumnwise) {
            assert!(found.is_some(), "{}", recipe.name());
        }
    }
}

#[test]
fn a_shard_with_its_own_tensor_scale_is_caught() {
    let scaled = |r: &AnyRecipe| observes_amax(r);
    let recipes: Vec<AnyRecipe> = AnyRecipe::all().into_iter().filter(scaled).collect();
    assert!(recipes.len() >= 4, "recipes with a tensor scale");
    for recipe in recipes {
        for found in audited(recipe, Defect::OwnTensorScale) {
            assert!(found.is_some(), "{}", recipe.name());
        }
    }
}

/// A scale is found by its reciprocal, which several scales share: the audit must find the one that
/// the codes were written with, where the next one would give another code.
#[test]
fn codes_of_any_delayed_scale_are_not_taken_for_those_of_its_neighbours() {
    let delayed = |r: &AnyRecipe| is_delayed(r);
    let recipes: Vec<AnyRecipe> = AnyRecipe::all().into_iter().filter(delayed).collect();
    assert!(!recipes.is_empty());
    // 17 lies between the codes of 16 and 18: the value that one scale puts there, or just below,
    // the other puts above.
    let tie = |scale: f32, other: f32| {
        let near = (17.0 / scale).to_bits();
        let values = (near - 8..near + 8).map(f32::from_bits);
        let apart = |v: &f32| (v * scale <= 17.0) != (v * other <= 17.0);
        values.clone().find(apart)
    };
    let mut found = 0;
    for bits in (0x3F80_0001..0x4400_0000u32).step_by(1_000_003) {
        let scale = f32::from_bits(bits);
        let back = 1.0 / (1.0 / scale);
        if back == scale {
            continue;
        }
        let Some(value) = tie(scale, back) else {
            continue;
        };
        for &recipe in &recipes {
            let shape = Shape::new(1, 32);
            let mut values = vec![1.0 / scale; shape.elements()];
            values[7] = value;
            let master = Cpu.upload(&values).expect("room");
            let cast = |scale| {
                let source = Source::F32(master.clone());
                quantize(&Cpu, recipe, shape, Usage::BOTH, source, Some(scale)).expect("a tensor")
            };
            for orientation in Orientation::ALL {
                let audited = |tensor: &_| audit(&Cpu, tensor, orientation, &master);
                let tensor = cast(scale);
                assert_eq!(audited(&tensor), Ok(None), "{} {scale}", recipe.name());
                // The scale of one and the codes of another that has another reciprocal.
                let other = cast(scale * 1.5);
                let codes = Cpu.download(&other.data(orientation).expect("data").storage);
                let to = &tensor.data(orientation).expect("data").storage;
                Cpu.write(to, 0, &codes.expect("bytes")).expect("room");
                let found = audited(&tensor).expect("an audit");
                assert!(found.is_some(), "{} {scale}", recipe.name());
            }
        }
        found += 1;
    }
    assert!(found >= 5, "{found} scales");
}
