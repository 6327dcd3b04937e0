//! Order of two instances: the newer one is the one that was first seen later. Pure.

use crate::app::handover::INSTANCES_MAX;
use nodedock_model::Uid;

/// The instances that served on this root, the newest last.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Order(Vec<Uid>);

/// The answer to an instance that requests the handover.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Decision {
    /// It is newer.
    HandOver,
    /// It was there before: it serves again when the newer one is gone.
    StandBy,
    /// It has the UID of the instance that serves.
    Duplicate,
}

impl Order {
    /// Parses a line for each. A line that is not a UID is left out: a lost order costs one needless handover.
    pub(super) fn parse(text: &str) -> Self {
        let mut order = Self::default();
        text.lines()
            .filter_map(|line| Uid::new(line.trim()).ok())
            .for_each(|uid| order.add(&uid));
        order
    }

    pub(super) fn text(&self) -> String {
        self.0.iter().map(|uid| format!("{uid}\n")).collect()
    }

    /// Adds an instance that serves. A known one keeps its position.
    pub(super) fn add(&mut self, instance: &Uid) {
        if self.0.contains(instance) {
            return;
        }
        if self.0.len() >= INSTANCES_MAX {
            self.0.remove(0);
        }
        self.0.push(instance.clone());
    }

    pub(super) fn decide(&self, serves: &Uid, requests: &Uid) -> Decision {
        match (self.position(serves), self.position(requests)) {
            _ if serves == requests => Decision::Duplicate,
            (Some(serves), Some(requests)) if requests < serves => Decision::StandBy,
            // An unknown instance is new.
            _ => Decision::HandOver,
        }
    }

    fn position(&self, uid: &Uid) -> Option<usize> {
        self.0.iter().position(|known| known == uid)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn uid(text: &str) -> Uid {
        Uid::new(text).unwrap()
    }

    #[test]
    fn last_seen_instance_takes_precedence() {
        let mut order = Order::default();
        order.add(&uid("old"));
        let decide = |order: &Order, serves, asks| order.decide(&uid(serves), &uid(asks));
        assert_eq!(decide(&order, "old", "new"), Decision::HandOver);
        order.add(&uid("new"));
        assert_eq!(decide(&order, "new", "old"), Decision::StandBy);
        // The new one crashed, the old one served again, and the new one is back.
        order.add(&uid("old"));
        assert_eq!(decide(&order, "old", "new"), Decision::HandOver);
        assert_eq!(decide(&order, "new", "new"), Decision::Duplicate);
    }

    #[test]
    fn instance_order_round_trips() {
        let mut order = Order::default();
        for n in 0..INSTANCES_MAX + 3 {
            order.add(&uid(&format!("i-{n}")));
        }
        assert_eq!(order.0.len(), INSTANCES_MAX);
        assert_eq!(Order::parse(&order.text()), order);
        let damaged = format!("\0\0\n{}../../etc\n{}", "x".repeat(4096), order.text());
        assert_eq!(Order::parse(&damaged), order);
    }

    proptest! {
        /// An instance that handed over to another one is not handed the lease back by it.
        #[test]
        fn handover_between_two_instances_is_final(seen in proptest::collection::vec(0..6u8, 0..12), a in 0..6u8, b in 0..6u8) {
            let name = |n: u8| uid(&format!("i-{n}"));
            let mut order = Order::default();
            seen.iter().for_each(|n| order.add(&name(*n)));
            order.add(&name(a));
            if order.decide(&name(a), &name(b)) == Decision::HandOver {
                order.add(&name(b));
                prop_assert_eq!(order.decide(&name(b), &name(a)), Decision::StandBy);
            }
        }
    }
}
