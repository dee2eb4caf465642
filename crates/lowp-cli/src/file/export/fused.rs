//! `--fused`: what becomes of weights that engines run as one and that have scales of their own.

use crate::output::{note, shown};
use crate::usage::{AMAX_GROUP, input_error};
use anyhow::Result;
use clap::ValueEnum;
use lowp_file::export::{Export, ExportTarget, FusedLayers};

/// Groups of weights that a message names.
const NAMED: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum OnFused {
    /// Nothing is written
    Error,
    /// They are written, and named
    Warn,
    /// They are written
    Ignore,
}

impl OnFused {
    /// Looks at the scales of the tensor that are stored for the target `to`.
    pub(super) fn check(self, export: &Export<'_>, to: ExportTarget) -> Result<()> {
        if self == Self::Ignore {
            return Ok(());
        }
        let found = export.fused()?;
        if found.is_empty() {
            return Ok(());
        }
        let message = message(&found, to);
        if self == Self::Error {
            return Err(input_error(message));
        }
        note(&format!("warning: {message}"));
        Ok(())
    }
}

fn message(found: &[FusedLayers<'_>], to: ExportTarget) -> String {
    let most = found.iter().map(FusedLayers::spread).fold(1f32, f32::max);
    let of_group = |group: &FusedLayers<'_>| {
        let each = group.scales.iter();
        let each = each.map(|(name, scale)| format!("'{}' {scale:e}", shown(name)));
        each.collect::<Vec<_>>().join(", ")
    };
    let named: Vec<String> = found.iter().take(NAMED).map(of_group).collect();
    let more = match found.len().saturating_sub(NAMED) {
        0 => String::new(),
        1 => "; and 1 more group".to_owned(),
        more => format!("; and {more} more groups"),
    };
    format!(
        "inference engines run these layers as one, with one tensor scale, but in {} their scales differ: {}{more}. Engines use one scale for all, \
         up to {most:.3} times that of another layer, or round its codes again. Quantize or train with {AMAX_GROUP} auto, the default, which \
         gives them one, or give --fused ignore",
        to.name(),
        named.join("; ")
    )
}
