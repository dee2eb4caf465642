//! Just enough of the lexical structure of Rust (and CUDA) to tell code from comments, strings and
//! unit tests.

use std::ops::Range;

/// A source file line by line. Line `i` of either view is line `i + 1` of the file.
#[derive(Debug)]
pub(super) struct Lexed {
    /// Comments are blank.
    pub(super) code: Vec<String>,
    /// Comments and the contents of string and character literals are blank.
    pub(super) bare: Vec<String>,
}

/// Splits `source` into its views.
pub(super) fn lex(source: &str) -> Lexed {
    let (mut code, mut bare, mut rest) = (String::new(), String::new(), source);
    while !rest.is_empty() {
        let before = code.strip_suffix(['b', 'c']).unwrap_or(&code);
        let (length, hidden, is_comment) = token(rest, before.ends_with(is_word));
        let (text, after) = rest.split_at(length);
        for (at, c) in text.char_indices() {
            // A view that hides it gets a space, so that columns and lines stay.
            let blank = if c == '\n' { c } else { ' ' };
            let hides = hidden.contains(&at);
            code.push(if hides && is_comment { blank } else { c });
            bare.push(if hides { blank } else { c });
        }
        rest = after;
    }
    let lines = |text: String| text.split('\n').map(str::to_owned).collect();
    Lexed {
        code: lines(code),
        bare: lines(bare),
    }
}

/// The comment, the literal or the character that `text` begins with: its length, what of it is hidden, and whether it is a comment.
/// `in_word` says whether an `r` there is the end of a name.
fn token(text: &str, in_word: bool) -> (usize, Range<usize>, bool) {
    let comment = |end: usize| (end, 0..end, true);
    let literal = |open: usize, end: usize| (text.len().min(end + 1), open..end, false);
    let find = |from: usize, end: &str| text[from..].find(end).map_or(text.len(), |at| from + at);
    let mut chars = text.chars();
    match [chars.next(), chars.next(), chars.next()] {
        [Some('/'), Some('/'), _] => comment(find(0, "\n")),
        [Some('/'), Some('*'), _] => comment(block_comment(text)),
        [Some('"'), ..] => literal(1, string_end(text)),
        [Some('r'), Some('"' | '#'), _] if !in_word => {
            let hashes = text[1..].len() - text[1..].trim_start_matches('#').len();
            match text[1 + hashes..].starts_with('"') {
                true => literal(
                    2 + hashes,
                    find(2 + hashes, &format!("\"{}", "#".repeat(hashes))),
                ),
                // `r#name`.
                false => (1, 0..0, false),
            }
        }
        // The escaped character may be a quote.
        [Some('\''), Some('\\'), Some(c)] => literal(1, find(2 + c.len_utf8(), "'")),
        // `'x'` is a character, `'x` a lifetime.
        [Some('\''), Some(c), Some('\'')] => literal(1, 1 + c.len_utf8()),
        [Some(c), ..] => (c.len_utf8(), 0..0, false),
        [None, ..] => (0, 0..0, false),
    }
}

/// Where the string that `text` begins with closes.
fn string_end(text: &str) -> usize {
    let mut chars = text.char_indices().skip(1);
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return at,
            '\\' => drop(chars.next()),
            _ => {}
        }
    }
    text.len()
}

/// Where the block comment that `text` begins with ends; they nest.
fn block_comment(text: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < text.len() {
        match &text.as_bytes()[at..] {
            [b'/', b'*', ..] => (depth, at) = (depth + 1, at + 2),
            [b'*', b'/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    at
}

/// The code view without `#[cfg(test)] mod name { .. }` sections, with line numbers counted from 1.
///
/// A section ends at the first closing brace with the indentation of its attribute, as rustfmt
/// writes it.
pub(super) fn library_code(source: &str) -> Vec<(usize, String)> {
    let Lexed { code, bare } = lex(source);
    let mut kept = Vec::new();
    let mut line = 0;
    while line < code.len() {
        match test_section_end(&bare, line) {
            Some(end) => line = end + 1,
            None => {
                kept.push((line + 1, code[line].clone()));
                line += 1;
            }
        }
    }
    kept
}

/// The last line of the test section that starts at line `start`, if one does.
fn test_section_end(bare: &[String], start: usize) -> Option<usize> {
    let indent = bare[start].strip_suffix("#[cfg(test)]")?;
    if !indent.trim().is_empty() {
        return None;
    }
    // More attributes may stand between.
    let head = (start + 1..bare.len()).find(|&line| {
        let text = bare[line].trim();
        !text.is_empty() && !text.starts_with("#[")
    })?;
    let text = bare[head].trim_end();
    if !words(text).any(|word| word == "mod") || !text.ends_with('{') {
        return None;
    }
    let closing = format!("{indent}}}");
    (head + 1..bare.len()).find(|&line| bare[line].trim_end() == closing)
}

/// The identifiers and keywords in a line.
pub(super) fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !is_word(c))
        .filter(|word| !word.is_empty())
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bare(source: &str) -> String {
        lex(source).bare.join("\n")
    }

    #[test]
    fn comments_are_blank_in_both_views() {
        let lexed = lex("a // b\n/* c /* d */ e */ f\n/// g\n\"//h\"");
        assert_eq!(lexed.code[0].trim(), "a");
        assert_eq!(lexed.code[1].trim(), "f");
        assert_eq!(lexed.code[2].trim(), "");
        assert_eq!(lexed.code[3], "\"//h\"");
        assert_eq!(lexed.bare[3], "\"   \"");
    }

    #[test]
    fn literals_of_every_kind_end_where_they_end() {
        for literal in [
            r#""a\"b""#,
            r##"r"a\""##,
            r###"r#"a"b"#"###,
            r#"b"a""#,
            r##"br"\""##,
            r#"'"'"#,
            r"'\''",
            r"'\\'",
            r"'\u{22}'",
        ] {
            let after = bare(&format!("{literal} end"));
            assert!(after.ends_with(" end"), "{literal}: {after}");
            assert!(!after.contains('a'), "{literal}: {after}");
        }
        assert_eq!(bare("fn f<'a>(x: &'a str)"), "fn f<'a>(x: &'a str)");
        assert_eq!(bare("r#type"), "r#type");
    }

    #[test]
    fn lines_keep_their_numbers() {
        let lexed = lex("\"a\nb\"\nc");
        assert_eq!(lexed.bare, ["\" ", " \"", "c"]);
    }

    #[test]
    fn unit_tests_are_not_library_code() {
        let source = "fn a() {}\n#[cfg(test)]\nmod tests {\n    fn b() {}\n}\nfn c() {}\n#[cfg(test)]\nmod far;\n";
        let lines: Vec<String> = library_code(source)
            .into_iter()
            .map(|(_, text)| text)
            .collect();
        assert_eq!(
            lines,
            ["fn a() {}", "fn c() {}", "#[cfg(test)]", "mod far;", ""]
        );
        assert_eq!(library_code(source)[1].0, 6);
    }

    #[test]
    fn a_brace_in_a_string_does_not_end_the_section() {
        let source =
            "#[cfg(test)]\n#[rustfmt::skip]\nmod tests {\nconst A: &str = \"\n}\n\";\n}\nfn c() {}";
        let lines: Vec<String> = library_code(source)
            .into_iter()
            .map(|(_, text)| text)
            .collect();
        assert_eq!(lines, ["fn c() {}"]);
    }
}
