//! A set that usually has one element, without memory of its own until it has two: a set of the standard library takes room for eleven at
//! once.

use std::collections::BTreeSet;
use std::iter::{Chain, Flatten};
use std::{mem, option};

type Iter<'a, T> = Chain<option::IntoIter<&'a T>, Flatten<option::IntoIter<&'a BTreeSet<T>>>>;

/// Elements in ascending order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Few<T>(Elements<T>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Elements<T> {
    None,
    One(T),
    /// Also with fewer elements, after a removal.
    Many(BTreeSet<T>),
}

impl<T> Default for Few<T> {
    fn default() -> Self {
        Self(Elements::None)
    }
}

impl<T: Ord> Few<T> {
    /// Adds an element, unless the set has an equal one.
    pub fn insert(&mut self, element: T) {
        self.0 = match mem::replace(&mut self.0, Elements::None) {
            Elements::None => Elements::One(element),
            Elements::One(known) if known == element => Elements::One(known),
            Elements::One(known) => Elements::Many([known, element].into()),
            Elements::Many(mut many) => {
                many.insert(element);
                Elements::Many(many)
            }
        };
    }

    pub fn remove(&mut self, element: &T) {
        match &mut self.0 {
            Elements::One(known) if known == element => self.0 = Elements::None,
            Elements::Many(many) => drop(many.remove(element)),
            Elements::None | Elements::One(_) => {}
        }
    }

    pub fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }
}

impl<T> Few<T> {
    pub fn iter(&self) -> Iter<'_, T> {
        let (one, many) = match &self.0 {
            Elements::None => (None, None),
            Elements::One(one) => (Some(one), None),
            Elements::Many(many) => (None, Some(many)),
        };
        one.into_iter().chain(many.into_iter().flatten())
    }
}

impl<'a, T> IntoIterator for &'a Few<T> {
    type Item = &'a T;
    type IntoIter = Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn set_behaves_like_a_btree_set(steps in prop::collection::vec((0..4u8, any::<bool>()), 0..20)) {
            let (mut few, mut set) = (Few::default(), BTreeSet::new());
            for (element, adds) in steps {
                if adds {
                    few.insert(element);
                    set.insert(element);
                } else {
                    few.remove(&element);
                    set.remove(&element);
                }
                prop_assert!(few.iter().eq(&set));
                prop_assert_eq!(few.is_empty(), set.is_empty());
            }
        }
    }
}
