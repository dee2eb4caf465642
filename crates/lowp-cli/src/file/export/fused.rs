//! [`Fused`]: weights that engines run as one, and whether one scale serves them all.

use super::weight::Weight;
use crate::amax_groups::{OPTION, run_as_one};
use crate::file::input_error::input_error;
use crate::file::interchange::forms::Target;
use crate::output::{note, shown};
use anyhow::Result;
use clap::ValueEnum;

/// Groups of weights that a message names.
const NAMED: usize = 3;

/// What becomes of weights that engines run as one and that have scales of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Fused {
    /// Nothing is written
    Error,
    /// They are written, and named
    Warn,
    /// They are written
    Ignore,
}

/// Looks at the scales of the tensor that the target `to` stores of `weights`.
///
/// # Errors
/// Scales that differ where that is one; the source cannot be read.
pub(super) fn check(weights: &[Weight<'_>], fused: Fused, to: Target) -> Result<()> {
    if fused == Fused::Ignore {
        return Ok(());
    }
    let scaled: Vec<&Weight<'_>> = weights
        .iter()
        .filter(|w| w.scale_of_tensor().is_some())
        .collect();
    let names: Vec<&str> = scaled.iter().map(|weight| weight.name()).collect();
    let (mut told, mut groups, mut most) = (Vec::new(), 0usize, 1f32);
    for group in run_as_one(&names) {
        let mut scales = Vec::new();
        for &member in &group {
            scales.push(scaled[member].stored_scale()?);
        }
        if scales
            .iter()
            .all(|scale| scale.to_bits() == scales[0].to_bits())
        {
            continue;
        }
        groups += 1;
        let magnitudes = || scales.iter().copied().filter(|scale| *scale > 0.0);
        let [least, largest] =
            [f32::min, f32::max].map(|of| magnitudes().reduce(of).unwrap_or(1.0));
        most = most.max(largest / least);
        if groups <= NAMED {
            let members = group.iter().zip(&scales);
            let each =
                members.map(|(&member, scale)| format!("'{}' {scale:e}", shown(names[member])));
            told.push(each.collect::<Vec<_>>().join(", "));
        }
    }
    if groups == 0 {
        return Ok(());
    }
    let more = match groups.saturating_sub(NAMED) {
        0 => String::new(),
        1 => "; and 1 more group".to_owned(),
        more => format!("; and {more} more groups"),
    };
    let message = format!(
        "engines run these layers as one with one scale of the tensor, and {} has others for each: {}{more}. They take one scale for all, \
         up to {most:.3} times that of another layer, or round its codes again. Quantize or train with {OPTION} auto, the default, which \
         gives them one, or give --fused ignore",
        to.name(),
        told.join("; ")
    );
    match fused {
        Fused::Error => Err(input_error(message)),
        _ => {
            note(&format!("warning: {message}"));
            Ok(())
        }
    }
}
