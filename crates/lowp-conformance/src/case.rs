//! What is encoded in the suite: every row of the table of ingredients in every order of its data, and what every recipe
//! makes of them; and [`Oracle`], what the reference makes of a case.

use lowp_format::{
    AnyRecipe, Axis, BufferList, BufferSpec, Code, Columnwise, Extent, FourOverSix, KernelKey,
    MxScale, Orientation, PaddedForm, Quantizer, Quantizers, Recipe, RecipeOptions, Role,
    ScaleRule, Shape, SourceRounding, Usage, lcm,
};
use lowp_kernels::reference::{RandomBytes, Reference, in_form};
use lowp_kernels::testing::{RuleKind, TABLE};
use lowp_kernels::{Backend, Slot, Target, TensorInput};

use super::rig::Rig;

pub(super) const ROW_MAJOR: [Axis; 2] = [Axis::Rows, Axis::Cols];
pub(super) const TRANSPOSED: [Axis; 2] = [Axis::Cols, Axis::Rows];

/// How a tensor is quantized.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) quantizers: Quantizers,
    /// Whether it mixes what other cases have alone: few shapes are enough.
    pub(super) brief: bool,
}

/// What an encode knows of the tensor or of its lines, by orientation: the entries that it reads.
pub(super) type Outer = [Vec<f32>; 2];

impl Case {
    /// The ingredients by orientation.
    pub(super) fn kernels(&self) -> [KernelKey; 2] {
        self.quantizers.kernels()
    }

    /// Every buffer.
    pub(super) fn specs(&self) -> BufferList {
        self.quantizers.buffers(Usage::BOTH)
    }

    /// The buffers that serve `usage` and nothing else but what stands above them.
    pub(super) fn of_usage(&self, usage: Usage) -> Vec<BufferSpec> {
        let serves = |spec: &BufferSpec| {
            usage.contains(spec.key.usage)
                || spec.key.part.is_outer() && usage.intersects(spec.key.usage)
        };
        self.specs().into_iter().filter(serves).collect()
    }

    /// Columns must be a multiple of this.
    pub(super) fn columns(&self) -> usize {
        let quanta = self.specs();
        quanta.iter().fold(1, |n, spec| lcm(n, spec.col_quantum()))
    }

    /// The longest side of a block.
    pub(super) fn longest(&self) -> Option<usize> {
        let blocks = self.kernels().map(|key| key.block);
        blocks.into_iter().flatten().flatten().max()
    }

    /// Whether one amax or scale of the tensor serves both orientations.
    pub(super) fn shares(&self) -> bool {
        self.quantizers.outer_usages(Usage::BOTH).next() == Some(Usage::BOTH)
    }

    /// Whether some orientation is made of amaxes that are observed now.
    pub(super) fn waits(&self) -> bool {
        self.kernels().iter().any(|key| key.scale.waits_for_amax())
    }

    /// The ingredients changed by `change`, in both orientations.
    pub(super) fn with(mut self, change: impl Fn(&mut KernelKey)) -> Self {
        change(&mut self.quantizers.rowwise.kernel);
        change(&mut self.quantizers.columnwise.kernel);
        self
    }

    /// The same with the padding that GEMMs ask for, where there is none.
    pub(super) fn padded(mut self) -> Self {
        for side in [
            &mut self.quantizers.rowwise,
            &mut self.quantizers.columnwise,
        ] {
            if side.padded == PaddedForm::NONE {
                side.padded = PaddedForm::TILES_128X4;
            }
        }
        self
    }

    /// Entries for a matrix of `shape`: `value` for a tensor, multiples of it for lines.
    pub(super) fn outer(&self, shape: Shape, value: f32) -> Outer {
        Orientation::ALL.map(|orientation| {
            let apart = orientation == Orientation::Columnwise && !self.shares();
            let value = if apart { 0.75 * value } else { value };
            match self.kernels()[orientation as usize].scale.outer() {
                None => Vec::new(),
                Some((Extent::Tensor, _)) => vec![value],
                Some((Extent::Line, _)) => (0..Axis::outer(orientation).len(shape))
                    .map(|line| value * (1.0 + (line % 5) as f32))
                    .collect(),
            }
        })
    }
}

/// `entries` in one vector, after an entry that nothing reads, as what an encode knows; entries of both orientations
/// are the same ones where they `share`.
pub(super) fn inputs<B: Backend>(
    rig: &Rig<B>,
    case: &Case,
    entries: &Outer,
    input: impl Fn(KernelKey, Slot<B>) -> TensorInput<B>,
) -> [Option<TensorInput<B>>; 2] {
    let mut vector = vec![0.5];
    let mut starts = [1, 1];
    for orientation in 0..2 {
        if orientation == 0 || !case.shares() {
            starts[orientation] = vector.len();
            vector.extend(&entries[orientation]);
        }
    }
    let buffer = rig.buffer(&vector);
    Orientation::ALL.map(|orientation| {
        let key = case.kernels()[orientation as usize];
        key.scale.outer()?;
        let slot = Slot {
            buffer: buffer.clone(),
            index: starts[orientation as usize],
        };
        Some(input(key, slot))
    })
}

/// Observed amaxes where scales are made of them.
pub(super) fn observed<B: Backend>(key: KernelKey, slot: Slot<B>) -> TensorInput<B> {
    match key.scale.waits_for_amax() {
        true => TensorInput::Observed(slot),
        false => TensorInput::Known(slot),
    }
}

/// A matrix and what the reference makes of it, in both orientations.
#[derive(Clone, Debug)]
pub(super) struct Oracle<'a> {
    pub(super) shape: Shape,
    pub(super) kernels: [KernelKey; 2],
    pub(super) values: &'a [f32],
    pub(super) source_rounding: SourceRounding,
    /// What the reference takes: encode scales, or amaxes of two-level scales.
    pub(super) outer: Outer,
    pub(super) random: Option<RandomBytes>,
}

impl<'a> Oracle<'a> {
    /// Of f32 values that are not rounded first, under these entries.
    pub(super) fn new(case: &Case, shape: Shape, values: &'a [f32], outer: Outer) -> Self {
        Self {
            shape,
            kernels: case.kernels(),
            values,
            source_rounding: SourceRounding::F32,
            outer,
            random: None,
        }
    }

    pub(super) fn of(&self, orientation: Orientation) -> Reference<'_> {
        Reference {
            shape: self.shape,
            orientation,
            kernel: self.kernels[orientation as usize],
            values: self.values,
            source_rounding: self.source_rounding,
            tensor: &self.outer[orientation as usize],
            random: self.random,
        }
    }

    /// The same with what follows from `amaxes`.
    pub(super) fn under(mut self, amaxes: &Outer) -> Self {
        for orientation in Orientation::ALL {
            let index = orientation as usize;
            self.outer[index] = self.of(orientation).encode_scales(&amaxes[index]);
        }
        self
    }

    /// The amaxes of its values.
    pub(super) fn amaxes(&self) -> Outer {
        Orientation::ALL.map(|orientation| self.of(orientation).outer_amaxes())
    }

    /// The content of a buffer.
    pub(super) fn encode(&self, spec: &BufferSpec) -> Vec<u8> {
        let orientation = match spec.key.usage {
            Usage::COLUMNWISE => Orientation::Columnwise,
            _ => Orientation::Rowwise,
        };
        self.of(orientation).encode(spec).unwrap()
    }

    /// The content of a target, in its form.
    pub(super) fn target<B: Backend>(&self, target: &Target<B>) -> Vec<u8> {
        self.in_form(target, &self.encode(&target.spec))
    }

    /// `bytes`, the content of the buffer in Compact form, in the form of `target`.
    pub(super) fn in_form<B: Backend>(&self, target: &Target<B>, bytes: &[u8]) -> Vec<u8> {
        if target.form.is_none() {
            return bytes.to_vec();
        }
        let compact = Target::<B>::new(target.spec, target.bytes.clone());
        let from = compact.layout(self.shape).unwrap();
        in_form(&from, &target.layout(self.shape).unwrap(), bytes)
    }

    /// Fails unless `targets` hold what the reference gives; `what` is said of a failure.
    pub(super) fn assert<B: Backend>(
        &self,
        rig: &Rig<B>,
        targets: &[Target<B>],
        what: &dyn std::fmt::Debug,
    ) {
        for target in targets {
            let expected = self.target(target);
            let found = rig.content::<u8>(&target.bytes);
            assert_eq!(found.len(), expected.len());
            let at = match target.spec.key.part.is_outer() {
                true => difference(&floats(&found), &floats(&expected)),
                false => difference(&found, &expected),
            };
            let (spec, form, kernels) = (&target.spec, target.form, self.kernels);
            let shape = self.shape;
            assert_eq!(
                at, None,
                "{rig:?} {shape} {what:?} {form:?} {spec:?} {kernels:?}"
            );
        }
    }
}

/// Where two slices differ.
fn difference<T: PartialEq>(found: &[T], expected: &[T]) -> Option<usize> {
    found.iter().zip(expected).position(|(a, b)| a != b)
}

/// f32 entries as bits, with one NaN.
pub(super) fn floats(bytes: &[u8]) -> Vec<u32> {
    let entries = bytes.as_chunks().0.iter();
    bits(&entries.map(|b| f32::from_le_bytes(*b)).collect::<Vec<_>>())
}

/// A kernel whose columnwise buffers follow `axes`; or, with `None`, one copy for both.
pub(super) fn case(
    element: Code,
    scale: ScaleRule,
    blocks: Option<[[usize; 2]; 2]>,
    axes: Option<[Axis; 2]>,
) -> Case {
    let [row, col] = [0, 1].map(|side| KernelKey {
        block: blocks.map(|blocks| blocks[side]),
        ..KernelKey::new(element, scale)
    });
    let rowwise = Quantizer::row_major(row);
    let quantizers = match axes {
        None => Quantizers::shared(rowwise),
        Some(TRANSPOSED) => Quantizers::independent(rowwise, Quantizer::column_major(col)),
        Some(_) => Quantizers::independent(rowwise, Quantizer::row_major(col)),
    };
    let brief = false;
    Case { quantizers, brief }
}

pub(super) const CURRENT: ScaleRule = ScaleRule::Current {
    extent: Extent::Tensor,
    pow2: false,
    epsilon: 0.0,
};

pub(super) const LINES: ScaleRule = ScaleRule::Current {
    extent: Extent::Line,
    pow2: false,
    epsilon: 0.0,
};

#[cfg(test)]
pub(super) const CHOICES: [FourOverSix; 4] = [
    FourOverSix::Mae,
    FourOverSix::Mse,
    FourOverSix::Mae448,
    FourOverSix::Mse448,
];

/// The rules of a kind, with every way in which they differ.
fn rules(kind: RuleKind) -> Vec<ScaleRule> {
    let two_level = |extent, four_over_six| ScaleRule::TwoLevel {
        extent,
        four_over_six,
    };
    let float = |pow2, epsilon| ScaleRule::BlockF32 { pow2, epsilon };
    match kind {
        RuleKind::Unscaled => vec![ScaleRule::None],
        RuleKind::PerTensor => vec![CURRENT, LINES],
        RuleKind::PowerOfTwo => [MxScale::Te, MxScale::OcpFloor].map(ScaleRule::E8M0).into(),
        RuleKind::TwoLevel => {
            vec![
                ScaleRule::TWO_LEVEL,
                two_level(Extent::Line, FourOverSix::Off),
            ]
        }
        // Recipes have the others, too.
        RuleKind::FourOverSix => vec![
            two_level(Extent::Tensor, FourOverSix::Mae),
            two_level(Extent::Tensor, FourOverSix::Mse448),
            two_level(Extent::Line, FourOverSix::Mae),
            two_level(Extent::Line, FourOverSix::Mse448),
        ],
        RuleKind::BlockFloat => vec![float(true, 0.0), float(false, 1e-3)],
    }
}

/// Every row of the table, in every order of the columnwise data that its blocks allow: one copy for
/// both orientations, transposed, and row-major; with 1-D, 2-D and unusual blocks.
fn of_the_table() -> Vec<Case> {
    let (one_copy, transposed, row_major) = (None, Some(TRANSPOSED), Some(ROW_MAJOR));
    let mut cases = vec![];
    for (element, kind) in TABLE {
        for rule in rules(kind) {
            let of_lines = matches!(rule.outer(), Some((Extent::Line, _)));
            let n = match kind {
                RuleKind::Unscaled | RuleKind::PerTensor => {
                    // Lines of both orientations are not the same.
                    let orders = [transposed, row_major, one_copy].into_iter();
                    let orders = orders.take(if of_lines { 2 } else { 3 });
                    cases.extend(orders.map(|axes| case(element, rule, None, axes)));
                    continue;
                }
                RuleKind::TwoLevel | RuleKind::FourOverSix => 16,
                RuleKind::BlockFloat => 128,
                RuleKind::PowerOfTwo => 32,
            };
            let (lines, square) = (Some([[1, n], [n, 1]]), Some([[n, n]; 2]));
            if !of_lines {
                cases.push(case(element, rule, square, one_copy));
                cases.push(case(element, rule, square, transposed));
            }
            cases.push(case(element, rule, lines, transposed));
            cases.push(case(element, rule, lines, row_major));
            if rule == ScaleRule::E8M0(MxScale::Te) {
                cases.push(case(element, rule, Some([[6, 8], [4, 2]]), transposed));
            }
        }
    }
    cases
}

/// Every recipe with its defaults and with every other value of one option.
pub(super) fn recipes() -> Vec<AnyRecipe> {
    let mut recipes = AnyRecipe::all();
    for name in AnyRecipe::names() {
        for option in AnyRecipe::options_of(name).unwrap() {
            for text in (option.names)() {
                let mut options = RecipeOptions::default();
                options.set(option.name, text);
                // Not every recipe takes every value.
                if let Ok(recipe) = AnyRecipe::from_name(name, &options)
                    && !recipes.contains(&recipe)
                {
                    recipes.push(recipe);
                }
            }
        }
    }
    recipes
}

/// How recipes quantize weights, activations and gradients.
fn of_recipes() -> impl Iterator<Item = Case> {
    let brief = true;
    recipes().into_iter().flat_map(move |recipe| {
        Role::ALL.map(|role| Case {
            quantizers: recipe.quantizers(role),
            brief,
        })
    })
}

/// The cases of the table and of the recipes, each once.
pub(super) fn cases() -> Vec<Case> {
    let mut cases = of_the_table();
    // Casts do not know how a delayed scale comes about, nor where a transpose is derived.
    let told_apart = |case: &Case| {
        let Quantizers {
            rowwise,
            columnwise,
            relation,
        } = case.quantizers;
        let axes = [rowwise, columnwise].map(|side| (side.data, side.scales));
        let kernels = case.kernels().map(|key| match key.scale {
            ScaleRule::Delayed { .. } => KernelKey {
                scale: CURRENT,
                ..key
            },
            _ => key,
        });
        (kernels, axes, relation == Columnwise::Shared)
    };
    for case in of_recipes() {
        let known = |other: &Case| told_apart(other) == told_apart(&case);
        let delayed = case.kernels()[0].scale.is_delayed();
        let first_delayed = delayed && !cases.iter().any(|c| c.kernels()[0].scale.is_delayed());
        if first_delayed || !cases.iter().any(known) {
            cases.push(case);
        }
    }
    cases
}

/// Asked of the ingredients that there are, not of the rows: an element and a rule that have a kernel have
/// cases, in every order.
#[test]
fn every_kernel_has_cases() {
    let delayed = ScaleRule::Delayed {
        window: 4,
        algorithm: lowp_format::AmaxAlgorithm::Max,
        margin: 0,
    };
    let cases = cases();
    let mut kernels = 0;
    for element in Code::ALL {
        let mut rules: Vec<ScaleRule> = TABLE.iter().flat_map(|(_, kind)| rules(*kind)).collect();
        rules.dedup();
        rules.push(delayed);
        for (scale, block) in rules
            .into_iter()
            .flat_map(|scale| [None, Some([16, 16])].map(|block| (scale, block)))
        {
            let key = KernelKey {
                block,
                ..KernelKey::new(element, scale)
            };
            // Lines are of an orientation: they have no square blocks.
            let lines = matches!(scale.outer(), Some((Extent::Line, _)));
            if lowp_kernels::testing::known(&key).is_err() {
                continue;
            }
            kernels += 1;
            for axes in [None, Some(TRANSPOSED), Some(ROW_MAJOR)] {
                let covered = |case: &Case| {
                    let specs = case.specs();
                    let columnwise = specs.iter().find(|s| s.key.usage == Usage::COLUMNWISE);
                    case.kernels().iter().any(|other| {
                        let kind = RuleKind::of(other.scale) == RuleKind::of(scale);
                        other.element == element
                            && kind
                            && other.block.is_some() == block.is_some()
                            && other.scale.outer().map(|o| o.0) == scale.outer().map(|o| o.0)
                    }) && columnwise.map(|spec| spec.axes) == axes
                };
                let possible = axes.is_some() || !lines;
                assert_eq!(cases.iter().any(covered), possible, "{key:?} {axes:?}");
            }
        }
    }
    assert!(kernels > TABLE.len());
}

/// What recipes add that no row has: orientations that differ, transforms, and every option of an encode.
#[test]
fn recipes_add_cases() {
    let cases = cases();
    let any = |ask: &dyn Fn([KernelKey; 2]) -> bool| cases.iter().any(|c| ask(c.kernels()));
    assert!(any(&|[row, col]| row.element != col.element));
    assert!(any(&|[row, col]| row.hadamard != col.hadamard));
    assert!(any(&|[row, col]| row.scale.outer() != col.scale.outer()));
    for choice in CHOICES {
        let chosen = |key: &KernelKey| matches!(key.scale, ScaleRule::TwoLevel { four_over_six, .. } if four_over_six == choice);
        assert!(
            any(&|[row, col]| chosen(&row) && !chosen(&col)),
            "{choice:?}"
        );
    }
    for mode in [MxScale::Te, MxScale::OcpFloor, MxScale::Even] {
        assert!(
            any(&|[row, _]| row.scale == ScaleRule::E8M0(mode)),
            "{mode:?}"
        );
    }
}

/// Row counts around every boundary; the last is large enough for threads.
const ROWS: [usize; 9] = [0, 1, 16, 17, 33, 64, 65, 136, 200];

/// Shapes that `case` takes.
pub(super) fn shapes(case: &Case) -> Vec<Shape> {
    let unit = case.columns();
    if case.brief {
        let wide = Shape::new(136, 288usize.next_multiple_of(unit));
        return vec![
            Shape::new(0, unit),
            Shape::new(17, unit),
            wide,
            Shape::new(3, 0),
        ];
    }
    let mut shapes: Vec<Shape> = ROWS.iter().map(|&rows| Shape::new(rows, unit)).collect();
    shapes.push(Shape::new(136, 288usize.next_multiple_of(unit)));
    shapes.push(Shape::new(17, 640usize.next_multiple_of(unit)));
    shapes.push(Shape::new(3, 0));
    shapes
}

pub(super) fn bits(values: &[f32]) -> Vec<u32> {
    // One bit pattern for every NaN: arithmetic may choose any.
    values
        .iter()
        .map(|x| {
            if x.is_nan() {
                f32::NAN.to_bits()
            } else {
                x.to_bits()
            }
        })
        .collect()
}
