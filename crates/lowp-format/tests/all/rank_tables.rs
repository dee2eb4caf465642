//! The table of what ranks store and send: every rank stands in one line, with the bytes of the
//! plans.

use lowp_format::{
    AnyRecipe, GatherStep, Phase, PhasePlans, Recipe, RowCuts, Shape, Usage, gather_table,
    ranks_table,
};

/// Ranks of equal rows at the start, a shorter one, and empty ones after it.
const RAGGED: (Shape, usize) = (Shape::new(320, 64), 7);
const EVEN: (Shape, usize) = (Shape::new(256, 64), 4);
const ALONE: (Shape, usize) = (Shape::new(96, 64), 1);

fn plans(recipe: AnyRecipe, full: Shape, world: usize) -> PhasePlans {
    let cuts = RowCuts::new(full.rows, world, recipe.row_quantum(Usage::BOTH)).unwrap();
    PhasePlans::new(&recipe, full, &cuts, true).unwrap()
}

/// Bytes that `rank` sends in `phase`.
fn sent(plans: &PhasePlans, phase: Phase, rank: usize) -> usize {
    let pieces = plans
        .phase(phase)
        .steps
        .iter()
        .filter_map(|step| match step {
            GatherStep::Concat { pieces, .. } => Some(pieces[rank]),
            _ => None,
        });
    pieces.sum()
}

#[test]
fn every_rank_has_its_rows_stored_and_sent_bytes_in_one_line() {
    for recipe in AnyRecipe::all() {
        for (full, world) in [RAGGED, EVEN, ALONE] {
            let plans = plans(recipe, full, world);
            let labelled = Phase::ALL.map(|phase| (phase.name(), plans.phase(phase)));
            let table = ranks_table(&recipe, Usage::BOTH, &labelled);
            let (header, lines) = table.split_once('\n').unwrap();
            for column in [
                "ranks",
                "rows",
                "stores bytes",
                "sends forward",
                "sends backward",
            ] {
                assert!(header.contains(column), "{table}");
            }
            let mut next = 0;
            let mut rows_before = None;
            for line in lines.lines() {
                let cells: Vec<&str> = line.split_whitespace().collect();
                let [ranks, numbers @ ..] = &cells[..] else {
                    panic!("{table}");
                };
                // `3`, or `0-2` for several.
                let (first, last) = match ranks.split_once('-') {
                    Some((first, last)) => (first.parse().unwrap(), last.parse().unwrap()),
                    None => (ranks.parse().unwrap(), ranks.parse().unwrap()),
                };
                assert_eq!(
                    (first, ranks.contains('-')),
                    (next, first < last),
                    "{table}"
                );
                for rank in first..=last {
                    let shard = full.with_rows(plans.forward.cuts.range(rank).len());
                    let stored = recipe.stored(Usage::BOTH);
                    let stored: usize = stored.iter().map(|spec| spec.bytes(shard)).sum();
                    let [forward, backward] = Phase::ALL.map(|phase| sent(&plans, phase, rank));
                    let expected = [shard.rows, stored, forward, backward].map(|n| n.to_string());
                    assert_eq!(numbers, expected, "rank {rank}\n{table}");
                }
                // Neighbours that are equal share a line.
                assert_ne!(rows_before, Some(numbers[0]), "{table}");
                rows_before = Some(numbers[0]);
                next = last + 1;
            }
            assert_eq!(next, world, "{table}");
        }
    }
    assert_eq!(ranks_table(&AnyRecipe::all()[0], Usage::BOTH, &[]), "");
}

/// Up to 16 ranks the rows are spelled out; beyond that runs of equal ranks are counted.
#[test]
fn rows_of_many_ranks_are_counted() {
    let recipe = AnyRecipe::all()[0];
    for (rows, world, text) in [
        (
            31,
            16,
            "2 + 2 + 2 + 2 + 2 + 2 + 2 + 2 + 2 + 2 + 2 + 2 + 2 + 2 + 2 + 1",
        ),
        (33, 17, "16 x 2 + 1"),
        (20, 20, "20 x 1"),
        (31, 20, "15 x 2 + 1 + 4 x 0"),
    ] {
        let plans = plans(recipe, Shape::new(rows, 8), world);
        let table = gather_table(&[("forward", &plans.forward)]);
        let expected = format!("{rows}x8 over {world} ranks, rows {text}\n");
        assert!(table.starts_with(&expected), "{table}");
    }
}
