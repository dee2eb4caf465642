//! Golden vectors of whole tensors: every family, shape and recipe, on every backend.

use std::collections::BTreeSet;

use lowp_format::{
    AnyRecipe, Form, Orientation, QuantizedTensor, Quantizers, Recipe, RecipeOptions, Role,
    ScaleLayout, hadamard_rows, tensor_scale,
};
use lowp_golden::recipes::{self, Options};
use lowp_golden::{Golden, first_difference};

use super::*;
use lowp_kernels::{AmaxJob, DecodeJob, RepackJob};

/// The weight of a recipe, or its activation: an operand that passes a Hadamard transform along its columns.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Cast(AnyRecipe, Role);

impl Recipe for Cast {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn quantizers(&self, _: Role) -> Quantizers {
        self.0.quantizers(self.1)
    }

    fn source_rounding(&self) -> SourceRounding {
        self.0.source_rounding()
    }
}

/// The golden name of a recipe, and how it is cast.
type Named = (&'static str, Cast);

/// The recipe called `name`, with `options`.
fn recipe(name: &str, options: Options) -> AnyRecipe {
    let mut made = RecipeOptions::default();
    for (option, text) in options {
        made.set(option, text);
    }
    AnyRecipe::from_name(name, &made).expect("a known recipe")
}

/// What the files have, by name.
fn named() -> Vec<Named> {
    let casts = |of: &[recipes::Named], role| -> Vec<Named> {
        let cast = |&(golden, name, options)| (golden, Cast(recipe(name, options), role));
        of.iter().map(cast).collect()
    };
    let weights = casts(&recipes::WEIGHTS, Role::Weight);
    [weights, casts(&recipes::ACTIVATIONS, Role::Activation)].concat()
}

/// A tensor on the backend of a rig.
struct Tensor<'r, B: Backend> {
    rig: &'r Rig<B>,
    source: Source<B>,
    buffers: QuantizedTensor<B::Buffer<u8>, Cast>,
}

impl<'r, B: Backend> Tensor<'r, B> {
    /// The `x` of a golden file, in bf16 if `half`, cast for `usage`.
    fn cast(rig: &'r Rig<B>, golden: &Golden, case: Cast, usage: Usage, half: bool) -> Self {
        let shape = Shape::from_dims(&golden.shape("x")).expect("a matrix");
        let (source, _) = source(rig, &golden.f32("x"), half);
        let alloc = |_: &_, bytes| rig.backend.alloc(bytes);
        let buffers = QuantizedTensor::new::<KernelError>(case, shape, usage, alloc);
        let buffers = buffers.unwrap_or_else(|e| panic!("{case:?} {shape}: {e}"));
        let job = EncodeJob::fill(&rig.backend, &buffers, source.clone()).unwrap();
        for input in job.tensor.iter().flatten() {
            // A delayed scale is given.
            if let TensorInput::Known(Slot { buffer, index }) = input {
                let scale = golden.number("delayed_scale") as f32;
                rig.backend.write(buffer, *index, &[scale]).unwrap();
            }
        }
        rig.run(Work::Amax(AmaxJob::before(&rig.backend, &job)));
        rig.run(Work::Encode(vec![job]));
        Self {
            rig,
            source,
            buffers,
        }
    }

    fn part(&self, o: Orientation, part: Part) -> Option<Vec<u8>> {
        let buffer = self.buffers.part(o, part)?;
        Some(self.rig.content::<u8>(&buffer.storage))
    }

    /// The block scales of `o` in `form`.
    fn scales(&self, o: Orientation, form: Form) -> Option<Vec<u8>> {
        let scales = self.buffers.part(o, Part::BlockScale)?;
        let layout = |form| ScaleLayout::new(&scales.spec, self.buffers.shape(), o, form).unwrap();
        let to = self.rig.buffer(&vec![0xA5u8; layout(form).bytes()]);
        self.rig.run(Work::Repack(vec![RepackJob {
            from_layout: layout(Form::Compact),
            to_layout: layout(form),
            from: scales.storage.clone(),
            to: to.clone(),
        }]));
        Some(self.rig.content::<u8>(&to))
    }

    /// The amax of all values.
    fn amax(&self) -> f32 {
        let Self {
            rig,
            source,
            buffers,
        } = self;
        let buffer = rig.buffer(&[0f32]);
        let entry = Slot {
            buffer: buffer.clone(),
            index: 0,
        };
        let job = AmaxJob::new(&buffers.recipe(), buffers.shape(), source.clone(), entry);
        rig.run(Work::Amax(vec![job]));
        rig.content::<f32>(&buffer)[0]
    }

    fn decoded(&self, o: Orientation) -> Option<Vec<f32>> {
        let out = self
            .rig
            .buffer(&vec![0f32; self.buffers.shape().elements()]);
        let job = DecodeJob::new(&self.buffers, o, Source::F32(out.clone())).ok()?;
        self.rig.run(Work::Decode(vec![job]));
        Some(self.rig.content::<f32>(&out))
    }

    /// What it has under the name `what` of a golden tensor; `None` where it has no such thing.
    fn found(&self, what: &str, golden: &Golden) -> Option<Vec<u8>> {
        let (rowwise, columnwise) = (Orientation::Rowwise, Orientation::Columnwise);
        let kernel = self
            .buffers
            .recipe()
            .quantizers(Role::Weight)
            .rowwise
            .kernel;
        let of = |o: Orientation, what: &str| match what {
            "data" => self.part(o, Part::Data),
            "scale_inv" => {
                let padded = self.scales(o, Form::Padded);
                padded.or_else(|| self.part(o, Part::DecodeScale))
            }
            "scale_inv_swizzled" => self.scales(o, Form::Swizzled),
            _ => None,
        };
        match what {
            "scale_inv" => self.part(rowwise, Part::DecodeScale),
            "amax_columnwise" => self.part(columnwise, Part::Amax),
            "amax" => {
                let kept = self.part(rowwise, Part::Amax);
                kept.or_else(|| Some(bytes(&[self.amax()])))
            }
            "scale" => {
                let ScaleRule::Current { pow2, epsilon, .. } = kernel.scale else {
                    return None;
                };
                let scale = tensor_scale(self.amax(), kernel.element, pow2, epsilon);
                Some(bytes(&[scale]))
            }
            "dequantized" => self.decoded(rowwise).map(|values| bytes(&values)),
            "transformed" => Some(bytes(&transformed(self.buffers.shape(), golden.f32("x")))),
            _ => {
                let (o, what) = what.split_once('_')?;
                let mut orientations = Orientation::ALL.into_iter();
                of(orientations.find(|found| found.to_string() == o)?, what)
            }
        }
    }
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// What the values are after the transform, with columns along the rows: as the codes lie.
fn transformed(shape: Shape, mut values: Vec<f32>) -> Vec<f32> {
    hadamard_rows(&mut values, shape.cols);
    let column = |col| values.iter().skip(col).step_by(shape.cols).copied();
    (0..shape.cols).flat_map(column).collect()
}

/// Compares every tensor of the file that is named `<prefix>.*` with `tensor`, as far as it has `usage`.
fn compare<B: Backend>(golden: &Golden, prefix: &str, tensor: &Tensor<'_, B>) -> BTreeSet<String> {
    let mut compared = BTreeSet::new();
    for name in golden.tensors() {
        let Some(what) = name.strip_prefix(prefix).and_then(|n| n.strip_prefix('.')) else {
            continue;
        };
        let found = tensor.found(what, golden);
        let found = found.unwrap_or_else(|| panic!("{name}: the tensor has no such part"));
        let expected = golden.bytes(&name);
        assert_eq!(found.len(), expected.len(), "{name}: bytes");
        if let Some(at) = found.iter().zip(expected).position(|(a, b)| a != b) {
            let words = |bytes: &[u8]| -> Vec<f32> {
                let words = bytes.as_chunks().0.iter();
                words.map(|&word| f32::from_le_bytes(word)).collect()
            };
            // Any NaN is as good as another.
            let values = ["dequantized", "transformed"].contains(&what);
            let same = values && first_difference(&words(&found), &words(expected)).is_none();
            assert!(
                same,
                "{name}: byte {at} is {} and not {}",
                found[at], expected[at]
            );
        }
        compared.insert(name);
    }
    compared
}

/// Files of whole tensors.
fn files() -> Vec<String> {
    let whole =
        |name: &str| name.starts_with("ext_") || name.starts_with(|c: char| c.is_ascii_digit());
    Golden::names()
        .into_iter()
        .filter(|name| whole(name))
        .collect()
}

/// The golden tensors are there in `tensor`'s orientation.
fn has(golden: &Golden, prefix: &str) -> bool {
    golden.has(&format!("{prefix}.rowwise_data"))
}

pub fn every_vector_of_every_family_and_shape<B: Backend>(rig: &Rig<B>) {
    let (mut compared, mut used) = (0, BTreeSet::new());
    for name in files() {
        let golden = Golden::open(&name);
        let mut found = BTreeSet::from(["x".to_owned()]);
        for (prefix, case) in named() {
            if has(&golden, prefix) {
                let tensor = Tensor::cast(rig, &golden, case, Usage::BOTH, false);
                found.append(&mut compare(&golden, prefix, &tensor));
                used.insert(prefix);
            }
        }
        let all: BTreeSet<String> = golden.tensors().into_iter().collect();
        let missed: Vec<&String> = all.difference(&found).collect();
        assert!(missed.is_empty(), "{name}: nothing compared {missed:?}");
        compared += found.len();
    }
    assert!(compared > 2000, "only {compared} golden tensors compared");
    let unused: Vec<&str> = named()
        .into_iter()
        .map(|c| c.0)
        .filter(|c| !used.contains(c))
        .collect();
    assert_eq!(unused, recipes::ABSENT);
}

pub fn each_usage_alone_gives_the_same_bytes<B: Backend>(rig: &Rig<B>) {
    for name in [
        "96x160_normal_bf16",
        "ext_37x96_normal_bf16",
        "ext_16x32_normal_bf16",
    ] {
        let golden = Golden::open(name);
        let cases = named().into_iter();
        for (prefix, case) in cases.filter(|(prefix, _)| has(&golden, prefix)) {
            for o in Orientation::ALL {
                let tensor = Tensor::cast(rig, &golden, case, o.usage(), false);
                for what in ["data", "scale_inv"] {
                    let name = format!("{prefix}.{o}_{what}");
                    if what == "data" || golden.has(&name) {
                        let found = tensor.found(&format!("{o}_{what}"), &golden);
                        assert_eq!(found.expect("a part"), golden.bytes(&name), "{name}");
                    }
                }
            }
        }
    }
}

pub fn a_bf16_source_gives_the_same_bytes<B: Backend>(rig: &Rig<B>) {
    for name in [
        "64x96_normal_bf16",
        "ext_37x96_normal_bf16",
        "ext_130x140_normal_bf16",
    ] {
        let golden = Golden::open(name);
        let cases = named().into_iter();
        for (prefix, case) in cases.filter(|(prefix, _)| has(&golden, prefix)) {
            let tensor = Tensor::cast(rig, &golden, case, Usage::BOTH, true);
            assert!(compare(&golden, prefix, &tensor).len() >= 2);
        }
    }
}

/// A recipe by direction: each orientation as if its recipe were alone.
pub fn a_recipe_by_direction_has_the_rows_of_one_and_the_columns_of_another<B: Backend>(
    rig: &Rig<B>,
) {
    let (name, sides) = recipes::BY_DIRECTION;
    let both = Cast(recipe(name, &[]), Role::Weight);
    let mut compared = 0;
    for name in files() {
        let golden = Golden::open(&name);
        let shape = Shape::from_dims(&golden.shape("x")).expect("a matrix");
        let takes = |(_, name, options)| recipe(name, options).check(shape).is_ok();
        if !sides.into_iter().all(takes) {
            continue;
        }
        let tensor = Tensor::cast(rig, &golden, both, Usage::BOTH, false);
        for ((prefix, name, options), o) in sides.into_iter().zip(Orientation::ALL) {
            let alone = Cast(recipe(name, options), Role::Weight);
            let alone = Tensor::cast(rig, &golden, alone, o.usage(), false);
            let parts = |tensor: &Tensor<'_, B>| -> Vec<(Part, Vec<u8>)> {
                let buffers = tensor.buffers.buffers().iter();
                let serving = buffers.filter(|b| b.spec.key.usage.contains(o.usage()));
                let content = |bytes| rig.content::<u8>(bytes);
                serving
                    .map(|b| (b.spec.key.part, content(&b.storage)))
                    .collect()
            };
            assert_eq!(parts(&tensor), parts(&alone), "{name} {o}");
            for what in ["data", "scale_inv", "scale_inv_swizzled"] {
                let name = format!("{prefix}.{o}_{what}");
                if golden.has(&name) {
                    let found = tensor.found(&format!("{o}_{what}"), &golden);
                    assert_eq!(found.expect("a part"), golden.bytes(&name), "{name}");
                }
            }
        }
        compared += 1;
    }
    assert!(compared > 30, "{compared} files");
}
