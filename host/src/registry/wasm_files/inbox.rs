//! Orders of a file's worker, which it can look through while it works on one.

use std::collections::VecDeque;

use tokio::sync::mpsc;

use super::{ORDERS_WAITING_MAX, Order};

pub(super) struct Inbox {
    orders: mpsc::Receiver<Order>,
    /// Received and not carried out, in order.
    seen: VecDeque<Order>,
}

impl Inbox {
    pub(super) fn new(orders: mpsc::Receiver<Order>) -> Self {
        Self { orders, seen: VecDeque::new() }
    }

    /// The next order. Nothing is lost if this is dropped.
    pub(super) async fn next(&mut self) -> Option<Order> {
        match self.seen.pop_front() {
            Some(order) => Some(order),
            None => self.orders.recv().await,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.seen.is_empty() && self.orders.is_empty()
    }

    /// Resolves when the file is another, or is gone: what is under way with it is of no use any more. The order stays for `next`;
    /// nothing is lost if this is dropped.
    pub(super) async fn overtaken(&mut self) {
        while self.seen.len() < ORDERS_WAITING_MAX {
            let Some(order) = self.orders.recv().await else { break };
            let overtakes = matches!(order, Order::Load(_) | Order::Gone);
            self.seen.push_back(order);
            if overtakes {
                return;
            }
        }
        // Nothing more is received: the work goes on to its end.
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[tokio::test]
    async fn only_a_file_that_changed_or_went_overtakes_and_no_order_is_lost() {
        let (orders, inbox) = mpsc::channel(ORDERS_WAITING_MAX);
        let mut inbox = Inbox::new(inbox);
        assert!(inbox.is_empty() && inbox.overtaken().now_or_never().is_none());
        orders.send(Order::Again(None)).await.unwrap();
        assert!(inbox.overtaken().now_or_never().is_none());
        assert!(!inbox.is_empty());
        orders.send(Order::Gone).await.unwrap();
        assert!(inbox.overtaken().now_or_never().is_some());
        drop(orders);
        assert!(inbox.overtaken().now_or_never().is_none(), "nobody is left to overtake it");
        assert!(matches!(inbox.next().await, Some(Order::Again(None))));
        assert!(matches!(inbox.next().await, Some(Order::Gone)));
        assert!(inbox.next().await.is_none());
    }
}
