//! Keys of hardware that claims hold, and the conflicts between them. Pure.
//!
//! A key is a device's own name (`driver/pool/device`), an identity string of a driver, a directory below `/sys/devices` or the numbers of
//! a device node. Two holds of different claims exclude each other if they have one key, or if the directory of one lies below that of the
//! other, unless both are shared. A key that the host derived itself from the edits of a container excludes only devices of other drivers:
//! a driver reports by identity strings and counters which of its own devices exclude each other.

use std::collections::BTreeMap;

use super::{DriverName, Few, Hold};

/// Keys that begin with it are directories of devices.
pub const DEVICES: &str = "/sys/devices/";

/// Keys that begin with it are numbers of device nodes: `node:KIND:MAJOR:MINOR`.
pub const NODE_KEY: &str = "node:";

/// One claim's hold of a key.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Held<O> {
    owner: O,
    derived: bool,
    driver: Option<DriverName>,
}

type Index<O> = BTreeMap<String, Few<Held<O>>>;

/// The holds of all claims, by key. `O` names a claim.
#[derive(Debug)]
pub struct HeldKeys<O> {
    exclusive: Index<O>,
    shared: Index<O>,
}

impl<O> Default for HeldKeys<O> {
    fn default() -> Self {
        Self {
            exclusive: Index::new(),
            shared: Index::new(),
        }
    }
}

impl<O: Ord + Clone> HeldKeys<O> {
    fn side(&mut self, hold: &Hold) -> &mut Index<O> {
        if hold.shared {
            &mut self.shared
        } else {
            &mut self.exclusive
        }
    }

    pub fn add(&mut self, owner: &O, hold: &Hold) {
        self.side(hold)
            .entry(hold.key.clone())
            .or_default()
            .insert(held(owner, hold));
    }

    /// Removes a hold as it was added.
    pub fn remove(&mut self, owner: &O, hold: &Hold) {
        let held = held(owner, hold);
        let side = self.side(hold);
        let Some(holders) = side.get_mut(&hold.key) else {
            return;
        };
        holders.remove(&held);
        if holders.is_empty() {
            side.remove(&hold.key);
        }
    }

    /// Returns a claim, other than `owner`, whose hold is in the way of a hold, and the key that it holds.
    pub fn in_the_way(&self, owner: Option<&O>, hold: &Hold) -> Option<(&O, &str)> {
        let mut found = None;
        self.visit(owner, hold, |held, key| {
            found = Some((held, key));
            false
        });
        found
    }

    /// Returns every claim, other than `owner`, whose hold is in the way of a hold, with the key that it holds. A claim may occur several
    /// times.
    pub fn all_in_the_way(&self, owner: Option<&O>, hold: &Hold) -> Vec<(&O, &str)> {
        let mut found = Vec::new();
        self.visit(owner, hold, |held, key| {
            found.push((held, key));
            true
        });
        found
    }

    /// Visits what is in the way of a hold until `visit` returns false.
    fn visit<'a>(
        &'a self,
        owner: Option<&O>,
        hold: &Hold,
        mut visit: impl FnMut(&'a O, &'a str) -> bool,
    ) {
        let shared = (!hold.shared).then_some(&self.shared);
        for index in [Some(&self.exclusive), shared].into_iter().flatten() {
            for (key, holders) in related(index, &hold.key) {
                let mut others = holders
                    .iter()
                    .filter(|held| owner != Some(&held.owner) && acts(hold, held));
                if !others.all(|held| visit(&held.owner, key)) {
                    return;
                }
            }
        }
    }
}

fn held<O: Clone>(owner: &O, hold: &Hold) -> Held<O> {
    Held {
        owner: owner.clone(),
        derived: hold.derived,
        driver: hold.driver.clone(),
    }
}

/// Returns whether two holds can exclude each other.
fn acts<O>(hold: &Hold, other: &Held<O>) -> bool {
    let is_derived = hold.derived || other.derived;
    !(is_derived && hold.driver.is_some() && hold.driver == other.driver)
}

/// The holders of a key, and of the directories above and below it.
fn related<'a, O>(
    index: &'a Index<O>,
    key: &str,
) -> impl Iterator<Item = (&'a str, &'a Few<Held<O>>)> {
    let own = index.get_key_value(key);
    let is_directory = key.starts_with(DEVICES) && !index.is_empty();
    let above = is_directory.then(|| {
        let ends = key.match_indices('/').map(|(end, _)| &key[..end]);
        ends.skip_while(|above| above.len() < DEVICES.len())
            .filter_map(|above| index.get_key_value(above))
    });
    let below = is_directory.then(|| {
        // `0` follows `/`.
        index.range(format!("{key}/")..format!("{key}0"))
    });
    let all = own
        .into_iter()
        .chain(above.into_iter().flatten())
        .chain(below.into_iter().flatten());
    all.map(|(key, holders)| (key.as_str(), holders))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use proptest::prelude::*;

    const GPU: &str = "/sys/devices/pci0000:3a/0000:3b:00.0";
    const CARD: &str = "/sys/devices/pci0000:3a/0000:3b:00.0/drm/card0";
    const OTHER: &str = "/sys/devices/pci0000:3a/0000:3b:00.01";

    fn hold(key: &str, shared: bool, derived: bool, driver: &str) -> Hold {
        Hold {
            key: key.to_owned(),
            shared,
            derived,
            driver: driver.parse().ok(),
            uses: Vec::new(),
        }
    }

    fn is_free(first: &Hold, second: &Hold) -> bool {
        let mut keys = HeldKeys::default();
        keys.add(&1, first);
        keys.in_the_way(Some(&2), second).is_none()
    }

    #[test]
    fn directory_excludes_its_ancestors_and_descendants() {
        let of = |key| hold(key, false, false, "a.dev");
        for (one, other, free) in [
            (GPU, GPU, false),
            (GPU, CARD, false),
            (GPU, OTHER, true),
            (
                CARD,
                "/sys/devices/pci0000:3a/0000:3b:00.0/drm/renderD128",
                true,
            ),
            ("/sys/devices/pci0000:3a", CARD, false),
            ("node:character:226:0", CARD, true),
            ("a.dev/pool/x", "a.dev/pool/x/y", true),
        ] {
            assert_eq!(
                (is_free(&of(one), &of(other)), is_free(&of(other), &of(one))),
                (free, free),
                "{one} {other}"
            );
        }
    }

    #[test]
    fn shared_holds_exclude_exclusive_ones_alone() {
        let of = |key, shared| hold(key, shared, false, "a.dev");
        assert!(is_free(&of(GPU, true), &of(CARD, true)));
        assert!(
            !is_free(&of(GPU, true), &of(CARD, false))
                && !is_free(&of(GPU, false), &of(CARD, true))
        );
    }

    #[test]
    fn derived_keys_exclude_only_other_drivers() {
        let of = |derived, driver| hold(GPU, false, derived, driver);
        for (one, other, free) in [
            (of(true, "a.dev"), of(true, "a.dev"), true),
            (of(true, "a.dev"), of(false, "a.dev"), true),
            (of(false, "a.dev"), of(false, "a.dev"), false),
            (of(true, "a.dev"), of(true, "b.dev"), false),
            (of(true, "a.dev"), of(false, "b.dev"), false),
        ] {
            assert_eq!(
                (is_free(&one, &other), is_free(&other, &one)),
                (free, free),
                "{one:?} {other:?}"
            );
        }
    }

    fn holds() -> impl Strategy<Value = Hold> {
        let keys = [
            GPU,
            CARD,
            OTHER,
            "/sys/devices/pci0000:3a",
            "/sys/devices/virtual/vfio/6",
            "pci:x",
            "node:character:1:2",
        ];
        let key = prop::sample::select(keys.to_vec());
        let driver = prop::sample::select(vec!["a.dev", "b.dev", ""]);
        (key, any::<bool>(), any::<bool>(), driver)
            .prop_map(|(key, shared, derived, driver)| hold(key, shared, derived, driver))
    }

    /// The rule as its sentences say it.
    fn exclude(one: &Hold, other: &Hold) -> bool {
        let is_below = |low: &Hold, high: &Hold| {
            low.key.starts_with(DEVICES)
                && low
                    .key
                    .strip_prefix(&high.key)
                    .is_some_and(|rest| rest.starts_with('/'))
        };
        let meet = one.key == other.key || is_below(one, other) || is_below(other, one);
        let own =
            (one.derived || other.derived) && one.driver.is_some() && one.driver == other.driver;
        meet && !own && !(one.shared && other.shared)
    }

    proptest! {
        #[test]
        fn held_keys_match_the_exclusion_rule(
            steps in prop::collection::vec((0..6u8, holds(), any::<bool>()), 1..40),
        ) {
            let (mut keys, mut all) = (HeldKeys::default(), Vec::new());
            for (owner, hold, adds) in steps {
                let found: BTreeSet<u8> = keys.all_in_the_way(Some(&owner), &hold).into_iter().map(|(owner, _)| *owner).collect();
                let others = all.iter().filter(|(other, held)| *other != owner && exclude(held, &hold));
                prop_assert_eq!(found, others.map(|(other, _): &(u8, Hold)| *other).collect());
                match all.iter().position(|known| *known == (owner, hold.clone())) {
                    Some(place) if !adds => {
                        all.remove(place);
                        keys.remove(&owner, &hold);
                    }
                    None if adds => {
                        keys.add(&owner, &hold);
                        all.push((owner, hold));
                    }
                    _ => {}
                }
            }
        }
    }
}
