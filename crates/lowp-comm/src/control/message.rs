//! [`without_backtraces`]: the text of an error as it travels.

/// The text of an error without the backtraces that libraries put into it where `RUST_BACKTRACE` or `RUST_LIB_BACKTRACE` is set, as
/// candle does: another rank, or a message of one line, has no use for them.
pub fn without_backtraces(text: &str) -> String {
    let mut kept: Vec<&str> = Vec::new();
    let mut within = false;
    for line in text.lines() {
        // A backtrace begins with frame 0, after what it belongs to.
        within = match frame(line) {
            Some(0) => !kept.is_empty(),
            Some(_) => within,
            // Where it is, or the end of the backtrace.
            None => within && (line.trim().is_empty() || line.trim_start().starts_with("at ")),
        };
        if !within {
            kept.push(line);
        }
    }
    kept.join("\n")
}

/// The number of the frame in a line `   7: name of a function` of a backtrace.
fn frame(line: &str) -> Option<usize> {
    let (number, _) = line.strip_prefix(' ')?.trim_start().split_once(": ")?;
    number.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::backtrace::Backtrace;

    use super::*;

    #[test]
    fn backtraces_are_left_out_and_all_else_stays() {
        let trace = Backtrace::force_capture();
        assert!(trace.to_string().lines().count() > 5, "{trace}");
        for (text, expected) in [
            (format!("it failed\n{trace}"), "it failed"),
            (format!("it failed\n{trace}\n{trace}"), "it failed"),
            (
                format!("it failed\n{trace}\nin layer 3\n{trace}"),
                "it failed\nin layer 3",
            ),
            ("two\nlines".to_owned(), "two\nlines"),
            (
                "ranks differ:\n0: a\n1: b".to_owned(),
                "ranks differ:\n0: a\n1: b",
            ),
            ("   0: no backtrace".to_owned(), "   0: no backtrace"),
            (String::new(), ""),
        ] {
            assert_eq!(without_backtraces(&text), expected);
        }
    }
}
