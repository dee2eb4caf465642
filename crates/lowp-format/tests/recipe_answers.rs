//! What recipes answer about themselves agrees with the buffers that they name.

use lowp_format::{
    AnyRecipe, Code, Fp8Format, Orientation, Part, Recipe, RecipeOptions, Role, ScaleSource, Usage,
};

#[test]
fn low_precision_is_what_is_narrower_than_bf16() {
    let low = AnyRecipe::low_precision();
    for recipe in AnyRecipe::all() {
        let wide = [Code::F32, Code::Bf16].contains(&recipe.kernel().element);
        assert_eq!(low.contains(&recipe), !wide, "{}", recipe.name());
    }
    assert!(!low.is_empty());
}

#[test]
fn the_block_of_a_kernel_is_that_of_the_scales() {
    for recipe in AnyRecipe::all() {
        for orientation in Orientation::ALL {
            let specs = recipe.buffers(orientation.usage());
            let scales = specs
                .iter()
                .find(|spec| spec.key.serves(orientation, Part::BlockScale));
            let block = recipe.kernel().block(orientation);
            assert_eq!(block, scales.map(|s| s.block()), "{}", recipe.name());
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

/// What the number of a tensor means follows from the rule, for operands too.
#[test]
fn the_rule_says_what_the_number_of_the_tensor_is() {
    let roles = [Role::Weight, Role::Activation, Role::Gradient];
    for recipe in AnyRecipe::all() {
        for operand in roles.map(|role| recipe.operand(role)) {
            let parts: Vec<Part> = operand
                .buffers
                .iter()
                .map(|spec| spec.key.part)
                .filter(|part| part.is_per_tensor())
                .collect();
            let expected = operand.kernel.scale.tensor_part();
            assert_eq!(parts, Vec::from_iter(expected), "{}", recipe.name());
        }
        // Above block scales stands an amax; alone, a decode scale.
        let blocks = recipe.kernel().blocks.is_some();
        if let Some(part) = recipe.kernel().scale.tensor_part() {
            assert_eq!(part == Part::TensorAmax, blocks, "{}", recipe.name());
        }
    }
}

#[test]
fn a_tensor_amax_is_observed_for_every_tensor_scale() {
    for recipe in AnyRecipe::all() {
        let source = recipe.scale_source();
        let stored = recipe.buffers(Usage::BOTH);
        let scaled = stored.iter().any(|s| s.key.part.is_per_tensor());
        assert_eq!(source.observes_tensor_amax(), scaled, "{}", recipe.name());
        // A delayed scale comes of earlier steps: nothing waits for this one's amax.
        let delayed = matches!(source, ScaleSource::History { .. });
        assert_eq!(
            source.needs_tensor_amax(),
            scaled && !delayed,
            "{}",
            recipe.name()
        );
    }
}

/// docs/numerics.md 1.1: hybrid keeps E5M2's range for gradients only.
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
            let options = RecipeOptions {
                format: Some(format),
                ..RecipeOptions::default()
            };
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
                assert_eq!(operand.kernel.element, code, "{name} {format:?} {role:?}");
                let data = operand.buffers.iter().filter(|s| s.key.part == Part::Data);
                assert!(data.clone().count() > 0);
                assert!(data.map(|s| s.code).all(|c| c == code), "{name} {role:?}");
            }
        }
    }
    assert!(recipes > 0, "no recipe takes a format");
}
