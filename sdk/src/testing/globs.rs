//! Globs of grants: `*` and `?` stay within one path segment, `**` does not.

use globset::{GlobBuilder, GlobMatcher};

use crate::Problem;

pub(super) fn compile(pattern: &str) -> Result<GlobMatcher, Problem> {
    let glob = GlobBuilder::new(pattern).literal_separator(true).build();
    glob.map(|glob| glob.compile_matcher()).map_err(|error| Problem::invalid("bad-glob", error.to_string()))
}

/// Returns whether any of the globs matches; an invalid glob matches nothing.
pub(super) fn any_matches(globs: &[String], text: &str) -> bool {
    globs.iter().any(|glob| compile(glob).is_ok_and(|glob| glob.is_match(text)))
}

/// Returns whether the request is granted: literally, or by a glob that matches it as a path.
pub(super) fn covers(granted: &[String], requested: &str) -> bool {
    granted.iter().any(|glob| glob == requested) || any_matches(granted, requested)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn globs(globs: &[&str]) -> Vec<String> {
        globs.iter().map(|&glob| glob.to_owned()).collect()
    }

    #[test]
    fn one_star_stays_within_a_segment_and_two_do_not() {
        assert!(any_matches(&globs(&["class/*/dev"]), "class/misc/dev"));
        assert!(!any_matches(&globs(&["class/*/dev"]), "class/misc/fuse/dev"));
        assert!(any_matches(&globs(&["class/**/dev"]), "class/misc/fuse/dev"));
    }

    #[test]
    fn a_wider_grant_covers_a_narrower_request_and_not_the_other_way_round() {
        assert!(covers(&globs(&["/dev/*"]), "/dev/loop*"));
        assert!(covers(&globs(&["/dev/loop[0-9]*"]), "/dev/loop[0-9]*"));
        assert!(!covers(&globs(&["/dev/loop*"]), "/dev/*"));
    }

    #[test]
    fn what_is_no_glob_is_said_and_matches_nothing() {
        assert_eq!(compile("/dev/[").unwrap_err().code, "bad-glob");
        assert!(!any_matches(&globs(&["/dev/["]), "/dev/["));
    }
}
