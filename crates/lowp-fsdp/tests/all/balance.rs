//! How evenly Llama-3 lies on many ranks, and how evenly these send it, in every recipe.

use lowp_comm::Mesh;
use lowp_format::{AnyRecipe, Recipe};
use lowp_fsdp::cost::{CostConfig, Costs, ModelShapes};

const RANKS: [usize; 3] = [64, 512, 1024];

/// Name, width, hidden width and blocks; keys and values have 1,024 rows.
const MODELS: [(&str, usize, usize, usize); 3] = [
    ("8b", 4096, 14336, 32),
    ("70b", 8192, 28672, 80),
    ("405b", 16384, 53248, 126),
];

fn llama((_, width, hidden, blocks): (&str, usize, usize, usize)) -> ModelShapes {
    let mut model = ModelShapes::default();
    for block in 0..blocks {
        for (name, rows, cols) in [
            ("q_proj", width, width),
            ("k_proj", 1024, width),
            ("v_proj", 1024, width),
            ("o_proj", width, width),
            ("gate_proj", hidden, width),
            ("up_proj", hidden, width),
            ("down_proj", width, hidden),
        ] {
            model.linear(block, name.to_owned(), rows, cols);
        }
    }
    model
}

/// The most over the mean: of masters, moments, codes and scales, and of what is sent of a block.
fn ratios(model: &ModelShapes, recipe: AnyRecipe, ranks: usize) -> [f64; 2] {
    let config = CostConfig {
        mesh: Mesh::sharded(ranks),
        ..CostConfig::default()
    };
    let recipes = vec![recipe; model.layers.len()];
    let costs = Costs::new(model, &recipes, recipe.name(), &config, None).expect("a plan");
    let sent = costs.spread.sent.iter();
    let sent = sent.map(|sent| sent.bytes.ratio());
    [costs.spread.total.ratio(), sent.fold(1.0, f64::max)]
}

#[test]
fn llama_lies_on_many_ranks() {
    let mut text = "most / mean of memory, and of bytes sent of a block\n".to_owned();
    text += &format!("{:12}", "");
    for (name, ..) in MODELS {
        for ranks in RANKS {
            text += &format!("{:>13}", format!("{name} {ranks}"));
        }
    }
    for recipe in AnyRecipe::all() {
        text += &format!("\n{:12}", recipe.name());
        for model in MODELS {
            let shapes = llama(model);
            for ranks in RANKS {
                let [memory, sent] = ratios(&shapes, recipe, ranks);
                text += &format!("{memory:7.2}{sent:6.2}");
            }
        }
    }
    insta::assert_snapshot!(text);
}
