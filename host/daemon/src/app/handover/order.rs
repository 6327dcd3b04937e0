//! Which of two instances is the newer: the one that was seen first later. Pure.

use nodedock_model::{Uid, limit};

/// The instances that served on this root, the newest last.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Order(Vec<Uid>);

/// What becomes of an instance that asks for the place of the one that serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Judgement {
    /// It is newer.
    HandOver,
    /// It was there before: it serves again when the newer one is gone.
    StandBy,
    /// It says that it is the one that serves.
    Twice,
}

impl Order {
    /// A line for each. What is no UID is left out: an order that is lost costs a hand-over too many.
    pub(super) fn parse(text: &str) -> Self {
        let mut order = Self::default();
        text.lines().filter_map(|line| Uid::new(line.trim()).ok()).for_each(|uid| order.note(&uid));
        order
    }

    pub(super) fn text(&self) -> String {
        self.0.iter().map(|uid| format!("{uid}\n")).collect()
    }

    /// Notes one that serves. One that is known keeps its place.
    pub(super) fn note(&mut self, instance: &Uid) {
        if self.0.contains(instance) {
            return;
        }
        if self.0.len() >= limit::INSTANCES_MAX {
            self.0.remove(0);
        }
        self.0.push(instance.clone());
    }

    pub(super) fn judge(&self, serves: &Uid, asks: &Uid) -> Judgement {
        let place = |uid: &Uid| self.0.iter().position(|known| known == uid);
        match (place(serves), place(asks)) {
            _ if serves == asks => Judgement::Twice,
            (Some(serves), Some(asks)) if asks < serves => Judgement::StandBy,
            // Nobody knows it, so it is new.
            _ => Judgement::HandOver,
        }
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
    fn the_one_that_was_seen_later_has_the_place() {
        let mut order = Order::default();
        order.note(&uid("old"));
        let judge = |order: &Order, serves, asks| order.judge(&uid(serves), &uid(asks));
        assert_eq!(judge(&order, "old", "new"), Judgement::HandOver);
        order.note(&uid("new"));
        assert_eq!(judge(&order, "new", "old"), Judgement::StandBy);
        // The new one crashed, the old one took its place again, and the new one is back.
        order.note(&uid("old"));
        assert_eq!(judge(&order, "old", "new"), Judgement::HandOver);
        assert_eq!(judge(&order, "new", "new"), Judgement::Twice);
    }

    #[test]
    fn what_is_written_is_read_and_the_rest_left_out() {
        let mut order = Order::default();
        for n in 0..limit::INSTANCES_MAX + 3 {
            order.note(&uid(&format!("i-{n}")));
        }
        assert_eq!(order.0.len(), limit::INSTANCES_MAX);
        assert_eq!(Order::parse(&order.text()), order);
        let damaged = format!("\0\0\n{}../../etc\n{}", "x".repeat(4096), order.text());
        assert_eq!(Order::parse(&damaged), order);
    }

    proptest! {
        /// Whoever of two gives way to the other is not asked back by it: they never pass the place to and fro.
        #[test]
        fn two_never_pass_the_place_to_and_fro(seen in proptest::collection::vec(0..6u8, 0..12), a in 0..6u8, b in 0..6u8) {
            let name = |n: u8| uid(&format!("i-{n}"));
            let mut order = Order::default();
            seen.iter().for_each(|n| order.note(&name(*n)));
            order.note(&name(a));
            if order.judge(&name(a), &name(b)) == Judgement::HandOver {
                order.note(&name(b));
                prop_assert_eq!(order.judge(&name(b), &name(a)), Judgement::StandBy);
            }
        }
    }
}
