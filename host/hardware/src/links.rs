//! Resolution of the links of a snapshot, each through the others. Pure.

use std::collections::{BTreeMap, HashMap};

use crate::limit::LINKS_MAX;
use crate::{Entry, Refusal};

/// A path of the snapshot, empty for its root; `None` if there is no entry where the link leads.
type Target<'a> = Option<&'a str>;

/// Resolves links, each once: a link through others takes what was found for them.
pub(crate) struct Links<'a> {
    entries: &'a BTreeMap<String, Entry>,
    /// Target, and number of links to it one after the other, by the path of the link.
    resolved: HashMap<&'a str, (Target<'a>, usize)>,
}

impl<'a> Links<'a> {
    /// Resolves every link. Fails with the first that leads to itself or out of the snapshot.
    pub(crate) fn check(entries: &'a BTreeMap<String, Entry>) -> Result<(), (&'a str, Refusal)> {
        let mut links = Links {
            entries,
            resolved: HashMap::new(),
        };
        for (path, entry) in entries {
            if let Entry::Link(target) = entry {
                links
                    .resolve(path, target, 0)
                    .map_err(|refusal| (path.as_str(), refusal))?;
            }
        }
        Ok(())
    }

    /// `outer` is the number of links that are being resolved and lead to this one. A link to itself reaches the bound.
    fn resolve(
        &mut self,
        link: &'a str,
        target: &'a str,
        outer: usize,
    ) -> Result<(Target<'a>, usize), Refusal> {
        if let Some(known) = self.resolved.get(link) {
            return Ok(*known);
        }
        if outer > LINKS_MAX {
            return Err(Refusal::LinkLoop);
        }
        let mut here = if target.starts_with('/') {
            ""
        } else {
            parent(link)
        };
        let (mut inner, mut is_there) = (0, true);
        for segment in target
            .split('/')
            .filter(|segment| !matches!(*segment, "" | "."))
        {
            if segment == ".." {
                if here.is_empty() {
                    return Err(Refusal::LinkLeaves {
                        target: target.to_owned(),
                    });
                }
                here = parent(here);
                continue;
            }
            let (place, links) = self.enter(here, segment, outer)?;
            inner = inner.max(links);
            let Some(place) = place else {
                is_there = false;
                break;
            };
            here = place;
        }
        if inner >= LINKS_MAX {
            return Err(Refusal::LinkLoop);
        }
        let found = (is_there.then_some(here), inner + 1);
        self.resolved.insert(link, found);
        Ok(found)
    }

    fn enter(
        &mut self,
        directory: &str,
        name: &str,
        outer: usize,
    ) -> Result<(Target<'a>, usize), Refusal> {
        let entries = self.entries;
        match entries.get_key_value(&format!("{directory}/{name}")) {
            Some((path, Entry::Link(target))) => self.resolve(path, target, outer + 1),
            Some((path, _)) => Ok((Some(path), 0)),
            None => Ok((None, 0)),
        }
    }
}

fn parent(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(parent, _)| parent)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(links: &[(&str, &str)]) -> Result<(), (String, Refusal)> {
        let mut entries = BTreeMap::new();
        for directory in ["/sys", "/sys/class", "/sys/devices", "/sys/devices/x"] {
            entries.insert(directory.to_owned(), Entry::Directory);
        }
        for (path, target) in links {
            entries.insert((*path).to_owned(), Entry::Link((*target).to_owned()));
        }
        Links::check(&entries).map_err(|(link, refusal)| (link.to_owned(), refusal))
    }

    #[test]
    fn links_inside_the_tree_are_accepted() {
        let links = [
            ("/sys/class/x", "../devices/x"),
            ("/sys/devices/x/subsystem", "../../class"),
            ("/sys/class/again", "x/subsystem/x/subsystem/x"),
            ("/sys/class/nowhere", "x/none/../../../../.."),
            ("/sys/root", "/"),
        ];
        assert_eq!(check(&links), Ok(()));
    }

    #[test]
    fn a_link_to_itself_is_refused() {
        for links in [
            &[("/sys/a", "a")][..],
            &[("/sys/a", "b"), ("/sys/b", "a")],
            &[("/sys/a", "class/b/x"), ("/sys/class/b", "../a")],
            &[("/sys/a", "./a/a/a")],
        ] {
            assert_eq!(
                check(links),
                Err(("/sys/a".to_owned(), Refusal::LinkLoop)),
                "{links:?}"
            );
        }
    }

    #[test]
    fn link_chains_are_bounded() {
        let chain = |count: usize, step: isize| {
            let name = |index: usize| format!("{index:03}");
            let target = |index: usize| {
                index
                    .checked_add_signed(step)
                    .filter(|index| *index < count)
            };
            let target = |index| target(index).map_or("class".to_owned(), name);
            let links: Vec<_> = (0..count)
                .map(|index| (format!("/sys/{}", name(index)), target(index)))
                .collect();
            let links: Vec<_> = links
                .iter()
                .map(|(path, target)| (path.as_str(), target.as_str()))
                .collect();
            check(&links).map_err(|(_, refusal)| refusal)
        };
        for step in [1, -1] {
            assert_eq!(chain(LINKS_MAX, step), Ok(()), "{step}");
            assert_eq!(chain(LINKS_MAX + 1, step), Err(Refusal::LinkLoop), "{step}");
        }
        assert_eq!(chain(100_000, -1), Err(Refusal::LinkLoop));
    }

    #[test]
    fn link_leaving_through_another_is_refused() {
        let links = [("/sys/class/x", "/sys"), ("/sys/out", "class/x/../../etc")];
        let refusal = Refusal::LinkLeaves {
            target: "class/x/../../etc".to_owned(),
        };
        assert_eq!(check(&links), Err(("/sys/out".to_owned(), refusal)));
    }
}
