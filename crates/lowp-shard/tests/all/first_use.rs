//! What the constructors from a recipe make equals what shards and gathers make of the same recipe.

use crate::common::{casts_flat, variants};
use lowp_kernels::{
    AmaxJob, AnyRecipe, Backend, Code, Cpu, CpuBuffer, DeviceBuffer, EncodeJob, FlatEncodeJob,
    Form, GroupScalars, Orientation, Part, Quantized, QuantizedTensor, Recipe, Rule, Shape, Source,
    StepScalars, Target, UpdateJob, Usage, Work,
};
use lowp_shard::{dequantize, quantize, scales_in_form};

const SHAPE: Shape = Shape::new(96, 128);

fn values() -> Vec<f32> {
    let value = |i: usize| ((i * 7919) % 1009) as f32 / 64.0 - 7.5;
    (0..SHAPE.elements()).map(value).collect()
}

fn source(values: &[f32]) -> Source<Cpu> {
    Source::F32(Cpu.upload(values).unwrap())
}

fn whole(
    recipe: AnyRecipe,
    values: &[f32],
    scale: Option<f32>,
) -> QuantizedTensor<CpuBuffer<u8>, AnyRecipe> {
    quantize(&Cpu, recipe, SHAPE, Usage::BOTH, source(values), scale).unwrap()
}

/// The content of every buffer, with its name.
fn bytes(tensor: &QuantizedTensor<CpuBuffer<u8>, AnyRecipe>) -> Vec<(String, Vec<u8>)> {
    let buffers = tensor.buffers().iter();
    buffers
        .map(|b| (b.spec.key.to_string(), b.storage.to_vec().unwrap()))
        .collect()
}

fn targets(targets: &[Target<Cpu>]) -> Vec<(String, Vec<u8>)> {
    let content = |t: &Target<Cpu>| (t.spec.key.to_string(), t.bytes.to_vec().unwrap());
    targets.iter().map(content).collect()
}

/// The scale with which delayed scaling begins.
fn first_scale(recipe: AnyRecipe) -> Option<f32> {
    let rowwise = recipe.kernel(Orientation::Rowwise);
    rowwise.scale.is_delayed().then_some(1.0)
}

/// Whether a cast waits for an amax.
fn waits(recipe: AnyRecipe) -> bool {
    let waits = |o| recipe.kernel(o).scale.waits_for_amax();
    Orientation::ALL.into_iter().any(waits)
}

#[test]
fn quantized_is_the_cast_of_the_whole_tensor() {
    for recipe in variants() {
        let values = values();
        let expected = whole(recipe, &values, None);
        let found = Quantized::encode(&Cpu, recipe, SHAPE, &values).unwrap();
        assert_eq!(bytes(found.tensor()), bytes(&expected), "{}", recipe.name());
        for orientation in Orientation::ALL {
            let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            assert_eq!(
                bits(found.decode_as(orientation).unwrap()),
                bits(dequantize(&Cpu, &expected, orientation).unwrap()),
                "{} {orientation:?}",
                recipe.name()
            );
        }
        assert!(found.decode().unwrap().iter().any(|&x| x != 0.0));
    }
}

#[test]
fn what_does_not_fit_a_recipe_is_an_error() {
    let recipe = AnyRecipe::from_name("mxfp8", &Default::default()).unwrap();
    let error = Quantized::encode(&Cpu, recipe, Shape::new(2, 33), &[0.0; 66]).unwrap_err();
    assert!(error.to_string().contains("2x33"), "{error}");
    let error = Quantized::encode(&Cpu, recipe, Shape::new(2, 32), &[0.0; 63]).unwrap_err();
    assert!(error.to_string().contains("63"), "{error}");
}

#[test]
fn an_encode_of_a_recipe_fills_what_the_cast_fills() {
    for recipe in variants() {
        let values = values();
        let job = EncodeJob::new(&Cpu, &recipe, SHAPE, Usage::BOTH, source(&values)).unwrap();
        let amax = AmaxJob::before(&Cpu, &job);
        assert_eq!(!amax.is_empty(), waits(recipe));
        Cpu.once(Work::Amax(amax)).unwrap();
        Cpu.once(Work::Encode(vec![job.clone()])).unwrap();
        let expected = whole(recipe, &values, first_scale(recipe));
        assert_eq!(targets(&job.targets), bytes(&expected), "{}", recipe.name());
    }
}

#[test]
fn scales_come_in_the_form_that_a_product_reads() {
    for recipe in AnyRecipe::low_precision() {
        let values = values();
        let job = EncodeJob::new(&Cpu, &recipe, SHAPE, Usage::BOTH, source(&values)).unwrap();
        // Tiles hold scales of 8 bits.
        let scales = Orientation::ALL.map(|o| recipe.kernel(o).scale.entry());
        let job = match job.with_scales_in(&Cpu, Form::Swizzled) {
            Ok(job) => job,
            Err(error) => {
                assert!(
                    scales.contains(&Some(Code::F32)),
                    "{}: {error}",
                    recipe.name()
                );
                continue;
            }
        };
        assert!(!scales.contains(&Some(Code::F32)), "{}", recipe.name());
        let amax = AmaxJob::before(&Cpu, &job);
        Cpu.once(Work::Amax(amax)).unwrap();
        Cpu.once(Work::Encode(vec![job.clone()])).unwrap();
        let expected = whole(recipe, &values, first_scale(recipe));
        for orientation in Orientation::ALL {
            let scales = scales_in_form(&Cpu, &expected, orientation, Form::Swizzled).unwrap();
            let of = |t: &&Target<Cpu>| t.form == Some((Form::Swizzled, orientation));
            let found = job
                .targets
                .iter()
                .find(of)
                .map(|t| t.bytes.to_vec().unwrap());
            assert_eq!(found, scales.map(|(_, bytes)| bytes), "{}", recipe.name());
        }
    }
}

#[test]
fn a_flat_encode_of_everything_is_the_cast() {
    for recipe in variants().into_iter().filter(casts_flat) {
        let values = values();
        let (usage, all) = (Usage::BOTH, 0..values.len());
        let job = FlatEncodeJob::new(&Cpu, &recipe, SHAPE, usage, all, source(&values));
        let mut job = job.unwrap();
        // Data that follow the columns are derived after a gather.
        job.targets.retain(|target| {
            target.spec.key.part != Part::Data || target.spec.axes[0] == lowp_kernels::Axis::Rows
        });
        Cpu.once(Work::Amax(AmaxJob::before_flat(&Cpu, &job)))
            .unwrap();
        Cpu.once(Work::FlatEncode(vec![job.clone()])).unwrap();
        let expected = bytes(&whole(recipe, &values, first_scale(recipe)));
        assert!(!job.targets.is_empty());
        for target in targets(&job.targets) {
            assert!(expected.contains(&target), "{} {}", recipe.name(), target.0);
        }
    }
}

#[test]
fn a_step_with_an_encode_is_the_step_and_the_cast() {
    for recipe in variants() {
        let master = Cpu.upload(&values()).unwrap();
        let grad = source(&vec![0.25; SHAPE.elements()]);
        let input = Source::F32(master.clone());
        let encode = EncodeJob::new(&Cpu, &recipe, SHAPE, Usage::BOTH, input).unwrap();
        let update = UpdateJob::new(&Cpu, Rule::AdamW, master.clone(), grad).unwrap();
        let (update, rest) = update.with_encode(encode.clone());
        assert_eq!(rest.is_some(), waits(recipe));
        let plan = Cpu.plan(Work::Update(vec![update])).unwrap();
        let scalars = StepScalars {
            groups: vec![GroupScalars::default().at_step(1)],
            ..StepScalars::default()
        };
        Cpu.run(&plan, &scalars).unwrap();
        Cpu.once(Work::Encode(rest.into_iter().collect())).unwrap();
        let new = master.to_vec().unwrap();
        assert_ne!(new, values());
        let expected = whole(recipe, &new, first_scale(recipe));
        assert_eq!(
            targets(&encode.targets),
            bytes(&expected),
            "{}",
            recipe.name()
        );
    }
}
