//! Text of files as it may be shown to people: harmless to a terminal, short enough to be read.

use std::fmt;

/// Characters of a name that are shown from its start and from its end, where it has more than both.
const NAME: [usize; 2] = [72, 24];
/// The same of a reason with its remedy; three of them and their names fit into a message.
const REASON: [usize; 2] = [200, 300];
/// The same of a whole message.
const MESSAGE: [usize; 2] = [1500, 500];
const AXES: usize = 8;

/// A name out of a file, or another text of somebody else, as it may be shown: at most some hundred characters, those
/// that control a terminal, reorder or hide text spelled out.
pub fn shown(name: &str) -> Shown<'_> {
    Shown(name)
}

/// Why something is so, which may repeat parts of a file, as it may be shown: with the remedy at its end.
pub fn reason(text: &str) -> String {
    shorten(text, REASON)
}

/// What [`shown`] returns.
#[derive(Clone, Copy, Debug)]
pub struct Shown<'a>(&'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&shorten(self.0, NAME))
    }
}

pub(crate) fn dims(shape: &[usize]) -> String {
    let Some((first, _)) = shape.split_at_checked(AXES + 1) else {
        return format!("{shape:?}");
    };
    let first: Vec<String> = first[..AXES].iter().map(usize::to_string).collect();
    format!("[{}, .. {} axes]", first.join(", "), shape.len())
}

/// A whole message as it may be shown.
pub fn message(text: &str) -> String {
    shorten(text, MESSAGE)
}

/// The first and last characters of a text, all harmless, and how many were left out between them.
fn shorten(text: &str, [head, tail]: [usize; 2]) -> String {
    // A file can state names of megabytes; the common case counts nothing.
    let count = match text.len() {
        bytes if bytes <= head + tail => bytes,
        _ => text.chars().count(),
    };
    if count <= head + tail {
        return harmless(text.chars());
    }
    format!(
        "{}[.. {} more characters ..]{}",
        harmless(text.chars().take(head)),
        count - head - tail,
        harmless(text.chars().skip(count - tail))
    )
}

/// `text` with everything spelled out that is no printable character: control characters, those that reorder or hide
/// text (Unicode's Cf), line and paragraph separators, spaces that are not ` `, and what has no meaning.
fn harmless(text: impl Iterator<Item = char>) -> String {
    let mut out = String::new();
    let mut utf8 = [0; 8];
    for c in text {
        // `str::escape_debug` knows what is printable, but escapes quotes, and a combining mark at the start of a text.
        if c.is_ascii_graphic() || c == ' ' {
            out.push(c);
        } else {
            utf8[0] = b'.';
            let end = 1 + c.encode_utf8(&mut utf8[1..]).len();
            let after_a_dot = str::from_utf8(&utf8[..end]).unwrap_or_default();
            out.extend(after_a_dot.escape_debug().skip(1));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_printable_is_spelled_out() {
        for (text, expected) in [
            ("a/\u{fc} '\"\\", "a/\u{fc} '\"\\"),
            ("\n\u{1b}[2J\u{9b}", "\\n\\u{1b}[2J\\u{9b}"),
            (
                "\u{202e}a\u{2066}b\u{2069}",
                "\\u{202e}a\\u{2066}b\\u{2069}",
            ),
            ("\u{2028}\u{2029}\u{85}", "\\u{2028}\\u{2029}\\u{85}"),
            (
                "\u{200b}\u{feff}\u{ad}\u{e0041}",
                "\\u{200b}\\u{feff}\\u{ad}\\u{e0041}",
            ),
            ("\u{a0}\u{3000}", "\\u{a0}\\u{3000}"),
            // Letters of every script stay, with the marks on them.
            (
                "e\u{301}\u{4e2d}\u{939}\u{93f}",
                "e\u{301}\u{4e2d}\u{939}\u{93f}",
            ),
            ("\u{301}", "\u{301}"),
        ] {
            assert_eq!(shown(text).to_string(), expected);
            assert_eq!(message(text), expected);
        }
    }

    #[test]
    fn long_texts_keep_their_ends() {
        let name = format!(
            "{}{}{}",
            "a".repeat(72),
            "\u{202e}".repeat(65_536),
            "z".repeat(24)
        );
        let text = shown(&name).to_string();
        assert!(text.starts_with("aaa") && text.ends_with("zzz"), "{text}");
        assert!(text.contains("[.. 65536 more characters ..]"), "{text}");
        let exact = "\u{fc}".repeat(96);
        assert_eq!(shown(&exact).to_string(), exact);
        assert!(message(&"\u{202e}".repeat(1 << 20)).len() < 20_000);
    }

    #[test]
    fn shapes_of_many_axes_are_cut() {
        assert_eq!(dims(&[]), "[]");
        assert_eq!(dims(&[1, 2, 3, 4, 5, 6, 7, 8]), "[1, 2, 3, 4, 5, 6, 7, 8]");
        assert_eq!(
            dims(&[1; 33_000]),
            "[1, 1, 1, 1, 1, 1, 1, 1, .. 33000 axes]"
        );
    }
}
