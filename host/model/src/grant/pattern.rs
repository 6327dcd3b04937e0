//! Globs over paths and names, and the check that one covers another.
//!
//! `*` and `?` stay inside a path segment, `**` matches whole segments, `[…]` and `{a,b}` are as in a shell. There are no escapes: nothing
//! below `/sys` or `/dev` needs them.

pub use globset::GlobMatcher;
use globset::{Glob, GlobBuilder, GlobSet, GlobSetBuilder};

use crate::limit::GRANT_ENTRY_BYTES_MAX;
use crate::rule::is_unprintable;

/// Alternatives that the cover check expands; beyond that it only compares texts.
const ALTERNATIVES_MAX: usize = 64;

/// Degree of explicitness with which a grant has to name something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Naming {
    /// Any glob.
    Glob,
    /// A glob that begins with this many path segments without wildcards.
    Directory(usize),
    /// The exact path.
    Path,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    #[error("it is empty")]
    Empty,
    #[error("it has {0} bytes, at most {GRANT_ENTRY_BYTES_MAX} are allowed")]
    TooLong(usize),
    #[error("it contains a control character, one that is not seen, or a backslash")]
    Character,
    #[error("`.`, `..` and empty segments are not allowed")]
    Segment,
    #[error("`**` must be a whole path segment")]
    DoubleStar,
    #[error("a class in brackets may hold ASCII letters, digits and ranges of them")]
    Class,
    #[error("{0}")]
    Syntax(String),
}

/// Returns whether the text has wildcards.
pub fn is_literal(text: &str) -> bool {
    !text.contains(['*', '?', '[', ']', '{', '}'])
}

/// Returns what is before the first wildcard.
pub fn literal_prefix(text: &str) -> &str {
    text.split(['*', '?', '[', '{']).next().unwrap_or(text)
}

/// Returns how many segments are before the first one with a wildcard, in each alternative (`{a,b}`).
pub fn literal_segments(glob: &str) -> usize {
    alternatives(glob)
        .and_then(|all| {
            all.iter()
                .map(|glob| {
                    glob.trim_start_matches('/')
                        .split('/')
                        .take_while(|segment| is_literal(segment))
                        .count()
                })
                .min()
        })
        .unwrap_or(0)
}

/// Parses a glob, relative or absolute.
pub fn compile(text: &str) -> Result<Glob, PatternError> {
    check(text)?;
    let built = GlobBuilder::new(text)
        .literal_separator(true)
        .backslash_escape(false)
        .build();
    built.map_err(|error| PatternError::Syntax(error.kind().to_string()))
}

fn check(text: &str) -> Result<(), PatternError> {
    if text.is_empty() || text == "/" {
        return Err(PatternError::Empty);
    }
    if text.len() > GRANT_ENTRY_BYTES_MAX {
        return Err(PatternError::TooLong(text.len()));
    }
    if text.contains(|c: char| is_unprintable(c) || c == '\\') {
        return Err(PatternError::Character);
    }
    check_classes(text)?;
    for segment in text.strip_prefix('/').unwrap_or(text).split('/') {
        if matches!(segment, "" | "." | "..") {
            return Err(PatternError::Segment);
        }
        if segment.contains("**") && segment != "**" {
            return Err(PatternError::DoubleStar);
        }
    }
    Ok(())
}

/// A class that is negated, or a range over punctuation, could match a slash.
fn check_classes(text: &str) -> Result<(), PatternError> {
    for part in text.split('[').skip(1) {
        let inside = part.split(']').next().unwrap_or(part);
        let plain = inside
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || c == '-');
        if inside.is_empty() || !plain || inside.starts_with('-') || inside.contains("--") {
            return Err(PatternError::Class);
        }
    }
    Ok(())
}

/// A set of globs that matches if any glob matches.
#[derive(Debug, Clone, Default)]
pub struct PatternSet {
    globs: GlobSet,
    texts: Vec<String>,
}

impl PatternSet {
    pub fn new(texts: impl IntoIterator<Item = impl Into<String>>) -> Result<Self, PatternError> {
        let texts: Vec<String> = texts.into_iter().map(Into::into).collect();
        let mut builder = GlobSetBuilder::new();
        for text in &texts {
            builder.add(compile(text)?);
        }
        let globs = builder
            .build()
            .map_err(|error| PatternError::Syntax(error.kind().to_string()))?;
        Ok(Self { globs, texts })
    }

    pub fn matches(&self, text: &str) -> bool {
        self.globs.is_match(text)
    }

    /// Returns whether one of the globs is this text, without wildcards.
    pub fn names(&self, text: &str) -> bool {
        is_literal(text) && self.texts.iter().any(|known| known == text)
    }

    /// Returns whether one of the globs matches, and names the text as explicitly as that.
    pub fn allows(&self, text: &str, naming: Naming) -> bool {
        match naming {
            Naming::Glob => self.matches(text),
            Naming::Directory(segments) => self.matches_below(text, segments),
            Naming::Path => self.names(text),
        }
    }

    /// Returns whether one of the globs matches and begins with this many segments without wildcards.
    pub fn matches_below(&self, text: &str, segments: usize) -> bool {
        self.globs
            .matches(text)
            .into_iter()
            .any(|index| literal_segments(&self.texts[index]) >= segments)
    }

    /// Returns whether one of the globs matches everything that `requested` matches.
    pub fn covers(&self, requested: &str) -> bool {
        self.texts.iter().any(|text| covers(text, requested))
    }
}

/// Returns whether `granted` matches everything that `requested` matches. Sound, not complete: in doubt it returns false.
pub fn covers(granted: &str, requested: &str) -> bool {
    if granted == requested {
        return true;
    }
    if is_literal(requested) {
        return compile(granted).is_ok_and(|glob| glob.compile_matcher().is_match(requested));
    }
    let (Some(granted), Some(requested)) = (alternatives(granted), alternatives(requested)) else {
        return false;
    };
    // Compares each alternative of one with each of the other.
    if granted.len() * requested.len() > ALTERNATIVES_MAX {
        return false;
    }
    requested
        .iter()
        .all(|r| granted.iter().any(|g| path_covers(g, r)))
}

/// Expands `{a,b}`; returns `None` if braces are nested, unbalanced or too many.
fn alternatives(text: &str) -> Option<Vec<String>> {
    let Some(open) = text.find('{') else {
        return Some(vec![text.to_owned()]);
    };
    let close = open + text[open..].find('}')?;
    let inside = &text[open + 1..close];
    // A brace inside a class is a literal; this does not distinguish it.
    if inside.contains(['{', '[', ']', '/']) || text[..open].contains('[') {
        return None;
    }
    let mut all = Vec::new();
    for rest in alternatives(&text[close + 1..])? {
        for choice in inside.split(',') {
            all.push(format!("{}{choice}{rest}", &text[..open]));
        }
    }
    (all.len() <= ALTERNATIVES_MAX).then_some(all)
}

fn path_covers(granted: &str, requested: &str) -> bool {
    let granted: Vec<&str> = granted.split('/').collect();
    let requested: Vec<&str> = requested.split('/').collect();
    segments_cover(&granted, &requested)
}

fn segments_cover(granted: &[&str], requested: &[&str]) -> bool {
    let last = granted.len().saturating_sub(1);
    let any = |place: usize, granted: &&str| match *granted {
        // At the end `**` matches at least one segment.
        "**" if place == last => Some(1),
        "**" => Some(0),
        _ => None,
    };
    covers_sequence(granted, requested, any, |granted, asked| {
        *asked != "**" && segment_covers(granted, asked)
    })
}

/// Wildcards of the request are opaque: only a star, or the same wildcard, covers them.
fn segment_covers(granted: &str, requested: &str) -> bool {
    match (tokens(granted), tokens(requested)) {
        (Some(granted), Some(requested)) => covers_sequence(
            &granted,
            &requested,
            |_, token| (*token == Token::Star).then_some(0),
            Token::takes,
        ),
        _ => false,
    }
}

/// Returns whether a sequence with gaps covers another. `any` returns, for the index of a gap, the minimum number of entries that it
/// covers. The number of steps is the product of the lengths, since a hostile driver may choose a request that is slow to match.
fn covers_sequence<G, R>(
    granted: &[G],
    requested: &[R],
    any: impl Fn(usize, &G) -> Option<usize>,
    takes: impl Fn(&G, &R) -> bool,
) -> bool {
    // For each tail of the request, whether the tail of the grant covers it.
    let mut tails = vec![false; requested.len() + 1];
    tails[requested.len()] = true;
    for (place, entry) in granted.iter().enumerate().rev() {
        let gap = any(place, entry);
        let mut further = false;
        let mut next = vec![false; tails.len()];
        for at in (0..tails.len()).rev() {
            next[at] = match gap {
                Some(least) => {
                    further |= tails.get(at + least).copied().unwrap_or(false);
                    further
                }
                None => requested
                    .get(at)
                    .is_some_and(|asked| tails[at + 1] && takes(entry, asked)),
            };
        }
        tails = next;
    }
    tails[0]
}

#[derive(PartialEq, Eq, Clone, Copy)]
enum Token<'a> {
    Literal(char),
    Any,
    Star,
    Class(&'a str),
}

impl Token<'_> {
    fn takes(&self, asked: &Self) -> bool {
        match self {
            Token::Any => !matches!(asked, Token::Star),
            _ => self == asked,
        }
    }
}

/// Returns `None` if a class does not end.
fn tokens(segment: &str) -> Option<Vec<Token<'_>>> {
    let mut all = Vec::new();
    let mut rest = segment;
    while let Some(c) = rest.chars().next() {
        let length = match c {
            '[' => rest.find(']')? + 1,
            _ => c.len_utf8(),
        };
        all.push(match c {
            '*' => Token::Star,
            '?' => Token::Any,
            '[' => Token::Class(&rest[..length]),
            c => Token::Literal(c),
        });
        rest = &rest[length..];
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_double_star_crosses_segments() {
        let set = PatternSet::new(["bus/pci/devices/*/vendor", "class/net/**"]).unwrap();
        assert!(set.matches("bus/pci/devices/0000:00:01.0/vendor"));
        assert!(!set.matches("bus/pci/devices/0000:00:01.0/x/vendor"));
        assert!(set.matches("class/net/eth0/device/vendor"));
        assert!(!set.matches("class/net"));
        assert!(!PatternSet::default().matches("class/net"));
    }

    #[test]
    fn ambiguous_globs_are_refused() {
        for bad in [
            "",
            "/",
            "a/../b",
            "a//b",
            "./a",
            "a/b**",
            "a\\*",
            "a\nb",
            "a[b",
            "a[!b]",
            "a[+-9]",
            "a[--9]",
            "{a",
            &"x".repeat(513),
        ] {
            assert!(compile(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn what_is_certainly_wider_covers() {
        for (granted, requested) in [
            ("class/net/*/address", "class/net/*/address"),
            ("class/net/*/*", "class/net/*/address"),
            ("class/net/**", "class/net/*/device/vendor"),
            ("**", "class/net/*/address"),
            ("**/vendor", "bus/pci/devices/*/vendor"),
            ("class/net/eth*/address", "class/net/eth0/address"),
            ("class/net/e*/address", "class/net/eth*/address"),
            (
                "class/net/*/{address,speed,mtu}",
                "class/net/*/{speed,address}",
            ),
            ("class/drm/card?/device", "class/drm/card[0-9]/device"),
            ("class/**/device", "class/device"),
        ] {
            assert!(covers(granted, requested), "{granted} covers {requested}");
        }
    }

    #[test]
    fn glob_comparison_takes_bounded_time() {
        let wide = format!("{}b", "**/a/".repeat(80));
        assert!(covers(&wide, &format!("*/{}b", "a/".repeat(200))));
        assert!(!covers(&wide, &format!("{}*", "a/".repeat(200))));
        let stars = "*a".repeat(200);
        assert!(covers(&stars, &format!("?{}", "a".repeat(400))));
        assert!(!covers(&stars, &format!("?{}b", "a".repeat(400))));
    }

    #[test]
    fn in_doubt_nothing_is_covered() {
        for (granted, requested) in [
            ("class/net/*/address", "class/net/*/*"),
            ("class/net/*", "class/net/**"),
            ("class/net/*/address", "class/net/**/address"),
            ("class/net/eth*/address", "class/net/*/address"),
            ("class/net/**", "class/net"),
            ("class/net/?", "class/net/*"),
            ("class/net/*/address", "class/net/*/{speed,address}"),
            ("class/{a,{b,c}}", "class/{a,b}"),
            ("class/[a-z]", "class/?"),
        ] {
            assert!(
                !covers(granted, requested),
                "{granted} does not cover {requested}"
            );
        }
    }

    proptest::proptest! {
        #[test]
        fn what_is_covered_is_matched(granted in "[ab*?]{1,4}(/[ab*?]{1,3}){0,2}", requested in "[ab]{1,3}(/[ab]{1,3}){0,2}",
                                      stars in proptest::collection::vec(0usize..12, 0..3)) {
            // Replaces parts of a literal path by stars: if the result is covered, the literal path must match.
            let mut wide: Vec<char> = requested.chars().collect();
            for star in stars {
                if let Some(c) = wide.get_mut(star).filter(|c| **c != '/') {
                    *c = '*';
                }
            }
            let wide: String = wide.into_iter().collect();
            if compile(&granted).is_ok() && compile(&wide).is_ok() && covers(&granted, &wide) {
                proptest::prop_assert!(PatternSet::new([granted.as_str()]).unwrap().matches(&requested));
            }
        }
    }
}
