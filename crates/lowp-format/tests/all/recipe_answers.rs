//! What recipes answer about themselves agrees with the buffers that they name.

use lowp_format::{
    AnyRecipe, BufferSpec, Code, Columnwise, Extent, Form, FourOverSix, Fp8Format, Orientation,
    Origin, Part, Quantizers, Recipe, RecipeOptions, Role, Rounding, ScaleLayout, ScaleRule, Shape,
    SourceRounding, Usage,
};

/// Every recipe with its defaults and with every other value of one option that has few.
fn variants() -> Vec<AnyRecipe> {
    let mut recipes = AnyRecipe::all();
    for name in AnyRecipe::names() {
        for option in AnyRecipe::options_of(name).unwrap() {
            for text in (option.names)() {
                let mut options = RecipeOptions::default();
                options.set(option.name, text);
                recipes.extend(AnyRecipe::from_name(name, &options));
            }
        }
    }
    recipes
}

/// Every way in which they quantize a tensor.
fn all() -> impl Iterator<Item = (AnyRecipe, Role, Quantizers)> {
    variants()
        .into_iter()
        .flat_map(|recipe| Role::ALL.map(|role| (recipe, role, recipe.quantizers(role))))
}

#[test]
fn low_precision_is_what_is_narrower_than_bf16() {
    let low = AnyRecipe::low_precision();
    for recipe in AnyRecipe::all() {
        let wide = |o| [Code::F32, Code::Bf16].contains(&recipe.kernel(o).element);
        let wide = Orientation::ALL.into_iter().any(wide);
        assert_eq!(low.contains(&recipe), !wide, "{}", recipe.name());
    }
    assert!(!low.is_empty());
}

#[test]
fn buffers_have_the_ingredients_of_the_orientations_that_they_serve() {
    for (recipe, role, quantizers) in all() {
        for orientation in Orientation::ALL {
            let kernel = quantizers.kernels()[orientation as usize];
            assert_eq!(kernel, quantizers.of(orientation).kernel);
            for usage in [orientation.usage(), Usage::BOTH] {
                let specs = quantizers.buffers(usage);
                let find = |part| {
                    let mut found = specs.iter().filter(|s| s.key.serves(orientation, part));
                    let first = found.next();
                    assert!(found.next().is_none());
                    first
                };
                let what = format!("{recipe:?} {role:?} {orientation} of {usage}");
                let data = find(Part::Data).expect("data");
                assert_eq!(
                    (data.code, data.block()),
                    (kernel.element, [1, 1]),
                    "{what}"
                );
                let scales = find(Part::BlockScale);
                assert_eq!(scales.map(|s| s.block()), kernel.block, "{what}");
                assert_eq!(scales.map(|s| s.code), kernel.scale.entry(), "{what}");
                for part in [Part::DecodeScale, Part::Amax] {
                    let expected = kernel.scale.outer().filter(|(_, p)| *p == part);
                    let block = expected.map(|(extent, _)| extent.block(orientation));
                    assert_eq!(find(part).map(|s| s.block()), block, "{what}");
                }
            }
        }
    }
}

#[test]
fn the_default_value_is_that_of_no_options() {
    let defaults = AnyRecipe::all();
    assert_eq!(defaults.len(), AnyRecipe::names().len());
    for (recipe, name) in defaults.into_iter().zip(AnyRecipe::names()) {
        let made = AnyRecipe::from_name(name, &RecipeOptions::default()).unwrap();
        assert_eq!(recipe, made);
        assert_eq!(recipe.name(), name);
    }
}

/// Above block scales stands an amax; alone, a decode scale. Nothing waits for an amax but what is made of one now.
#[test]
fn the_rule_says_what_the_number_of_the_tensor_is() {
    for (recipe, _, quantizers) in all() {
        for key in quantizers.kernels() {
            let outer = key.scale.outer();
            if let Some((_, part)) = outer {
                assert_eq!(part == Part::Amax, key.block.is_some(), "{recipe:?}");
            }
            assert_eq!(key.block.is_some(), key.scale.entry().is_some());
            let waits = outer.is_some() && !key.scale.is_delayed();
            assert_eq!(key.scale.waits_for_amax(), waits, "{recipe:?}");
        }
    }
}

/// One amax serves both orientations where the same values give the same scales; of lines, or after a transform,
/// each has its own.
#[test]
fn orientations_share_what_is_the_same_for_both() {
    let mut shared = 0;
    for (recipe, role, quantizers) in all() {
        let [row, col] = quantizers.kernels();
        let usages: Vec<_> = quantizers.outer_usages(Usage::BOTH).collect();
        let same = (row.scale, row.element, row.hadamard) == (col.scale, col.element, col.hadamard);
        let of_tensor = matches!(row.scale.outer(), Some((Extent::Tensor, _)));
        let expected = match same && of_tensor {
            true => vec![Usage::BOTH],
            false => vec![Usage::ROWWISE, Usage::COLUMNWISE],
        };
        assert_eq!(usages, expected, "{recipe:?} {role:?}");
        shared += usages.len() % 2;
        let outer = quantizers.buffers(Usage::BOTH);
        let outer: Vec<_> = outer.iter().filter(|s| s.key.part.is_outer()).collect();
        for spec in &outer {
            let local = !spec.is_scalar() && spec.key.usage == Usage::ROWWISE;
            // Rows are a shard's own; of a tensor or a column every rank has a part.
            assert_eq!(spec.origin == Origin::Quantized, local);
            assert!(local || spec.origin == Origin::Replicated);
        }
        for orientation in Orientation::ALL {
            let one: Vec<_> = quantizers.outer_usages(orientation.usage()).collect();
            assert_eq!(
                one,
                if same && of_tensor {
                    vec![Usage::BOTH]
                } else {
                    vec![orientation.usage()]
                }
            );
        }
    }
    assert!(shared > 0);
}

/// Options reach the orientation that has them.
#[test]
fn options_of_a_recipe_by_direction_reach_its_sides() {
    let changed = RecipeOptions::default().with("format", Fp8Format::E5M2);
    let recipe = AnyRecipe::from_name("nvfp4-mxfp8", &changed).unwrap();
    let [row, col] = recipe.quantizers(Role::Weight).kernels();
    assert_eq!([row.element, col.element], [Code::E2M1, Code::E5M2]);
}

/// Blocks of NVFP4 run along K and those of MXFP8 along M, in every role that a weight's K is a side of: K is a multiple
/// of 16, and of 32 only where both orientations are MXFP8.
#[test]
fn a_recipe_by_direction_takes_the_columns_of_its_rowwise_side() {
    let make = |name| AnyRecipe::from_name(name, &RecipeOptions::default()).unwrap();
    let (hybrid, nvfp4, mxfp8) = (make("nvfp4-mxfp8"), make("nvfp4-1d"), make("mxfp8"));
    for (rows, cols) in [(32, 48), (17, 16), (200, 80)] {
        let shape = Shape::new(rows, cols);
        assert!(hybrid.check(shape).is_ok() && mxfp8.check(shape).is_err());
        assert!(hybrid.check(Shape::new(rows, cols + 8)).is_err());
        for role in [Role::Weight, Role::Activation] {
            for (recipe, orientation) in [
                (nvfp4, Orientation::Rowwise),
                (mxfp8, Orientation::Columnwise),
            ] {
                let usage = orientation.usage();
                let of = |recipe: AnyRecipe| recipe.quantizers(role).buffers(usage);
                let alone = of(recipe);
                assert_eq!(of(hybrid).len(), alone.len());
                for (found, expected) in of(hybrid).iter().zip(&alone) {
                    let layout = |form| ScaleLayout::new(found, shape, orientation, form);
                    // An amax that serves both orientations of one recipe serves one of this.
                    let what = |spec: &BufferSpec| (spec.key.part, spec.code, spec.axes);
                    assert_eq!(what(found), what(expected));
                    assert_eq!(found.bytes(shape), expected.bytes(shape));
                    assert!(shape.cols.is_multiple_of(found.col_quantum()));
                    if found.key.part == Part::BlockScale {
                        let [outer, inner] = layout(Form::Swizzled).unwrap().padded();
                        assert!(outer.is_multiple_of(128) || inner.is_multiple_of(128));
                        let blocks = found.entries(shape);
                        let [height, width] = found.block();
                        let blocks_of_shape = rows.div_ceil(height) * (cols / width);
                        assert_eq!(blocks[0] * blocks[1], blocks_of_shape);
                    }
                }
            }
        }
    }
}

/// What is derived has the same ingredients, and blocks that a transpose keeps.
#[test]
fn only_what_is_the_same_turned_is_derived() {
    for (recipe, role, quantizers) in all() {
        let [row, col] = quantizers.kernels();
        let apart = quantizers.relation == Columnwise::Quantized;
        if !apart {
            assert_eq!(row, col, "{recipe:?} {role:?}");
            assert!(!row.hadamard);
            assert!(row.block.is_none_or(|[rows, cols]| rows == cols));
            assert!(!matches!(row.scale.outer(), Some((Extent::Line, _))));
        }
        let derived =
            |spec: &lowp_format::BufferSpec| matches!(spec.origin, Origin::TransposeOf(_));
        let transposed = quantizers.relation == Columnwise::Transposed;
        assert_eq!(
            quantizers.buffers(Usage::BOTH).iter().any(derived),
            transposed
        );
    }
}

/// docs/numerics.md 15, 20.1 and 20.2: weights are never transformed, gradients have no choice of four over six and
/// the amax of their tensor, and a transform and a choice exclude each other.
#[test]
fn transforms_and_choices_are_of_the_roles_that_have_them() {
    let mut seen = [0; 3];
    for (recipe, role, quantizers) in all() {
        let what = format!("{recipe:?} {role:?}");
        for (orientation, key) in Orientation::ALL.into_iter().zip(quantizers.kernels()) {
            let columnwise = orientation == Orientation::Columnwise;
            if key.hadamard {
                assert!(columnwise && role != Role::Weight, "{what}");
                seen[0] += 1;
            }
            let ScaleRule::TwoLevel {
                extent,
                four_over_six,
            } = key.scale
            else {
                continue;
            };
            if four_over_six.is_on() {
                assert!(role != Role::Gradient && !key.hadamard, "{what}");
                seen[1] += 1;
            }
            if extent == Extent::Line {
                assert!(role != Role::Gradient && !key.hadamard, "{what}");
                assert!(!(role == Role::Activation && columnwise), "{what}");
                seen[2] += 1;
            }
        }
        // Stochastic rounding is of gradients.
        assert!(
            role == Role::Gradient || recipe.rounding(role) == Rounding::Nearest,
            "{what}"
        );
    }
    assert!(seen.iter().all(|&n| n > 0), "{seen:?}");
}

/// docs/numerics.md 20.1 and 20.2: blocks are chosen under the amax of their row or column where rows have amaxes.
#[test]
fn four_over_six_goes_with_amaxes_of_rows() {
    for four_over_six in [FourOverSix::Mae, FourOverSix::Mse448] {
        let options = RecipeOptions::default()
            .with("row_scaled", true)
            .with("four_over_six", four_over_six);
        let recipe = AnyRecipe::from_name("nvfp4-1d", &options).unwrap();
        let extent = Extent::Line;
        let rule = ScaleRule::TwoLevel {
            extent,
            four_over_six,
        };
        let kernels = recipe.quantizers(Role::Weight).kernels();
        assert_eq!(kernels.map(|key| key.scale), [rule; 2]);
    }
}

/// docs/numerics.md 21: the GEMM operands that meet have one format: weight.row x input.row, weight.col x grad.row,
/// input.col x grad.col.
#[test]
fn operands_that_meet_have_one_format() {
    use Orientation::{Columnwise, Rowwise};
    use Role::{Activation, Gradient, Weight};
    for recipe in variants() {
        let key = |role, orientation| recipe.quantizers(role).of(orientation).kernel;
        for (a, b) in [
            ((Weight, Rowwise), (Activation, Rowwise)),
            ((Weight, Columnwise), (Gradient, Rowwise)),
            ((Activation, Columnwise), (Gradient, Columnwise)),
        ] {
            let [a, b] = [key(a.0, a.1), key(b.0, b.1)];
            assert_eq!(a.element.bits(), b.element.bits(), "{recipe:?}");
            assert_eq!(a.scale.entry(), b.scale.entry(), "{recipe:?}");
            assert_eq!(
                a.hadamard && b.hadamard,
                a.hadamard || b.hadamard,
                "{recipe:?}"
            );
        }
    }
}

/// docs/numerics.md 1.5: hybrid keeps E5M2's range for gradients only.
#[test]
fn gradients_of_hybrid_formats_are_e5m2() {
    use {Code::E4M3, Code::E5M2};
    let mut recipes = 0;
    for recipe in AnyRecipe::all() {
        for (format, weight, activation, gradient) in [
            (Fp8Format::E4M3, E4M3, E4M3, E4M3),
            (Fp8Format::Hybrid, E4M3, E4M3, E5M2),
            (Fp8Format::E5M2, E5M2, E5M2, E5M2),
        ] {
            let options = RecipeOptions::default().with("format", format);
            let Ok(recipe) = AnyRecipe::from_name(recipe.name(), &options) else {
                continue;
            };
            recipes += 1;
            for (role, code) in [
                (Role::Weight, weight),
                (Role::Activation, activation),
                (Role::Gradient, gradient),
            ] {
                let operand = recipe.operand(role);
                let name = recipe.name();
                // Of recipes that mix formats, the codes with 8 bits.
                let codes = operand.quantizers.kernels().map(|key| key.element);
                let mut fp8 = codes.iter().filter(|code| code.bits() == 8).peekable();
                assert!(fp8.peek().is_some(), "{name} {role:?}");
                assert!(fp8.all(|c| *c == code), "{name} {format:?} {role:?}");
                let buffers = operand.buffers();
                let data = buffers.iter().filter(|s| s.key.part == Part::Data);
                assert!(data.clone().count() > 0);
                assert!(
                    data.map(|s| s.code).all(|c| codes.contains(&c)),
                    "{name} {role:?}"
                );
            }
        }
    }
    assert!(recipes > 0, "no recipe takes a format");
}

/// An operand is quantized as its role is, and the source rounding is that of the recipe.
#[test]
fn operands_are_those_of_the_role() {
    for recipe in variants() {
        for role in Role::ALL {
            let operand = recipe.operand(role);
            assert_eq!(operand.quantizers, recipe.quantizers(role));
            assert_eq!(operand.rounding, recipe.rounding(role));
            assert_eq!(operand.source_rounding, recipe.source_rounding());
            assert_eq!(operand.quantized, Usage::BOTH);
        }
    }
    let via = RecipeOptions::default().with("source_rounding", SourceRounding::ViaBf16);
    for name in AnyRecipe::names() {
        if let Ok(recipe) = AnyRecipe::from_name(name, &via) {
            assert_eq!(recipe.source_rounding(), SourceRounding::ViaBf16, "{name}");
        }
    }
}
