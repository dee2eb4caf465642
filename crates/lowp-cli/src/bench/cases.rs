//! The rows of the bench: which work on which shapes.

use super::data::{Supply, target_bytes};
use anyhow::{Context, Result};
use lowp_format::{AnyRecipe, Code, Form, Orientation, Part, Recipe, ScaleLayout, Shape, Usage};
use lowp_kernels::{
    AdamwJob, AmaxJob, Backend, Cuda, DecodeJob, EncodeJob, HistoryJob, RepackJob, Slot, Source,
    SumSquaresJob, TransposeJob, Work,
};

/// What is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Adamw,
    AdamwEncode,
    Encode(Form),
    Decode,
    Amax,
    SumSquares,
    Transpose(Code),
    Swizzle,
}

/// One row.
#[derive(Clone, Debug)]
pub(super) struct Case {
    operation: Operation,
    recipe: Option<AnyRecipe>,
    tensors: usize,
    shape: Shape,
    names: [String; 3],
}

/// The work of one run, in order, and the bytes that it must move.
pub(super) struct Made {
    pub(super) work: Vec<Work<Cuda>>,
    pub(super) bytes: usize,
}

/// Every row; both sides of every shape are divided by `shrink`.
pub(super) fn all(shrink: usize) -> Vec<Case> {
    let square = |side: usize| Shape::new(side / shrink, side / shrink);
    let case = |operation, recipe, tensors, shape| Case::new(operation, recipe, tensors, shape);
    let steps = [(16, square(4096)), (256, square(1024)), (1000, square(256))];
    let matrix = square(16384);
    let mut cases = Vec::new();
    for (tensors, shape) in steps {
        cases.push(case(Operation::Adamw, None, tensors, shape));
        for recipe in AnyRecipe::low_precision() {
            cases.push(case(Operation::AdamwEncode, Some(recipe), tensors, shape));
        }
    }
    let has_swizzled = |recipe: &AnyRecipe| {
        swizzle_layouts(recipe, matrix).is_ok_and(|layouts| !layouts.is_empty())
    };
    for operation in [
        Operation::Encode(Form::Compact),
        Operation::Encode(Form::Swizzled),
        Operation::Decode,
    ] {
        for recipe in AnyRecipe::low_precision() {
            if operation != Operation::Encode(Form::Swizzled) || has_swizzled(&recipe) {
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
    for recipe in AnyRecipe::low_precision() {
        if has_swizzled(&recipe) {
            cases.push(case(Operation::Swizzle, Some(recipe), 8, matrix));
        }
    }
    cases
}

impl Case {
    fn new(operation: Operation, recipe: Option<AnyRecipe>, tensors: usize, shape: Shape) -> Self {
        let what = match operation {
            Operation::Adamw => "adamw".to_owned(),
            Operation::AdamwEncode => "adamw + encode both".to_owned(),
            Operation::Encode(Form::Compact) => "encode bf16 both".to_owned(),
            Operation::Encode(form) => format!("encode bf16 both, {}", form.name()),
            Operation::Decode => "decode rowwise".to_owned(),
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

    /// Operation, recipe and shape.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str)
    }

    /// Tensors of one run.
    pub(super) fn tensors(&self) -> usize {
        self.tensors
    }

    /// Makes the buffers and the work of one run.
    pub(super) fn make(&self, supply: &Supply<'_>) -> Result<Made> {
        let mut made = Steps::default();
        for index in 0..self.tensors {
            match self.operation {
                Operation::Adamw => {
                    made.bytes += update_bytes(self.shape);
                    made.adamw.push(supply.adamw(self.shape)?);
                }
                Operation::AdamwEncode => self.adamw_encode(supply, index, &mut made)?,
                Operation::Encode(form) => self.encode(supply, index, form, &mut made)?,
                Operation::Decode => self.decode(supply, index, &mut made)?,
                Operation::Amax => {
                    let source = Source::Bf16(supply.halves(self.shape.elements())?);
                    made.bytes += self.shape.elements() * 2;
                    made.amax.push(self.amax(supply, source, index));
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
        self.recipe.context("a row without a recipe")
    }

    fn amax(&self, supply: &Supply<'_>, source: Source<Cuda>, index: usize) -> AmaxJob<Cuda> {
        AmaxJob {
            shape: self.shape,
            start: 0,
            source,
            source_rounding: self
                .recipe
                .map_or(lowp_format::SourceRounding::F32, |recipe| {
                    recipe.source_rounding()
                }),
            out: supply.observed.clone(),
            tensor: Some(index),
            blocks: Default::default(),
        }
    }

    /// One pass where the scale is known before the values, else update and amax, then encode.
    fn adamw_encode(&self, supply: &Supply<'_>, index: usize, made: &mut Steps) -> Result<()> {
        let recipe = self.recipe()?;
        let source = recipe.scale_source();
        let mut job = supply.adamw(self.shape)?;
        job.source_rounding = recipe.source_rounding();
        made.bytes += update_bytes(self.shape);
        if source.observes_tensor_amax() {
            job.amax = Some(Slot {
                buffer: supply.observed.clone(),
                index,
            });
            made.history.extend(supply.history(&recipe, index)?);
        }
        let master = Source::F32(job.master.clone());
        let encode = supply.encode(&recipe, self.shape, master, index, Form::Compact)?;
        made.bytes += target_bytes(&encode);
        if source.needs_tensor_amax() {
            made.bytes += self.shape.elements() * 4;
            made.encode.push(encode);
        } else {
            job.encode = Some(Box::new(encode));
        }
        made.adamw.push(job);
        Ok(())
    }

    /// With its amax pass where the recipe needs the amax of this tensor.
    fn encode(
        &self,
        supply: &Supply<'_>,
        index: usize,
        form: Form,
        made: &mut Steps,
    ) -> Result<()> {
        let recipe = self.recipe()?;
        let source = Source::Bf16(supply.halves(self.shape.elements())?);
        let passes = usize::from(recipe.scale_source().needs_tensor_amax());
        if passes > 0 {
            made.amax.push(self.amax(supply, source.clone(), index));
        }
        let job = supply.encode(&recipe, self.shape, source, index, form)?;
        made.bytes += (1 + passes) * self.shape.elements() * 2 + target_bytes(&job);
        made.encode.push(job);
        Ok(())
    }

    fn decode(&self, supply: &Supply<'_>, index: usize, made: &mut Steps) -> Result<()> {
        let recipe = self.recipe()?;
        let source = Source::Bf16(supply.halves(self.shape.elements())?);
        let encoded = supply.encode(&recipe, self.shape, source, index, Form::Compact)?;
        supply.cuda.once(Work::Encode(vec![encoded.clone()]))?;
        let part = |part| encoded.target(Orientation::Rowwise, part).cloned();
        let data = part(Part::Data).context("no rowwise data")?;
        let block_scale = part(Part::BlockScale);
        let tensor_scale = encoded.kernel.scale.tensor_part().and_then(part);
        let read = [Some(&data), block_scale.as_ref(), tensor_scale.as_ref()];
        let read: usize = read.into_iter().flatten().map(|t| t.bytes.len()).sum();
        made.bytes += read + self.shape.elements() * 4;
        made.decode.push(DecodeJob {
            shape: self.shape,
            kernel: encoded.kernel,
            data,
            block_scale,
            tensor_scale: tensor_scale.map(|target| target.bytes),
            out: supply.cuda.alloc(self.shape.elements())?,
        });
        Ok(())
    }
}

/// Jobs by kind, in the order in which they run.
#[derive(Default)]
struct Steps {
    adamw: Vec<AdamwJob<Cuda>>,
    amax: Vec<AmaxJob<Cuda>>,
    history: Vec<HistoryJob<Cuda>>,
    encode: Vec<EncodeJob<Cuda>>,
    decode: Vec<DecodeJob<Cuda>>,
    transpose: Vec<TransposeJob<Cuda>>,
    repack: Vec<RepackJob<Cuda>>,
    sums: Vec<SumSquaresJob<Cuda>>,
    bytes: usize,
}

impl Steps {
    fn finish(self) -> Made {
        let mut work = Vec::new();
        let mut add = |empty: bool, step: Work<Cuda>| {
            if !empty {
                work.push(step);
            }
        };
        add(self.adamw.is_empty(), Work::Adamw(self.adamw));
        add(self.amax.is_empty(), Work::Amax(self.amax));
        add(self.history.is_empty(), Work::History(self.history));
        add(self.encode.is_empty(), Work::Encode(self.encode));
        add(self.decode.is_empty(), Work::Decode(self.decode));
        add(self.transpose.is_empty(), Work::Transpose(self.transpose));
        add(self.repack.is_empty(), Work::Repack(self.repack));
        add(self.sums.is_empty(), Work::SumSquares(self.sums));
        Made {
            work,
            bytes: self.bytes,
        }
    }
}

/// Master and moments read and written, the gradient read.
fn update_bytes(shape: Shape) -> usize {
    shape.elements() * (3 * 2 * 4 + 2)
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
