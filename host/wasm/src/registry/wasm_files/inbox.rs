//! The order queue of a file's worker, which the worker can inspect while it handles an order.

use std::collections::VecDeque;

use tokio::sync::mpsc;

use super::{ORDERS_WAITING_MAX, Order};

pub(super) struct Inbox {
    orders: mpsc::Receiver<Order>,
    /// Received and not handled, in order.
    seen: VecDeque<Order>,
}

impl Inbox {
    pub(super) fn new(orders: mpsc::Receiver<Order>) -> Self {
        Self { orders, seen: VecDeque::new() }
    }

    /// The next order. Cancel safe.
    pub(super) async fn next(&mut self) -> Option<Order> {
        match self.seen.pop_front() {
            Some(order) => Some(order),
            None => self.orders.recv().await,
        }
    }

    /// Whether newer files wait, or their removal: the older ones are obsolete.
    pub(super) fn has_newer(&mut self) -> bool {
        while self.seen.len() < ORDERS_WAITING_MAX
            && let Ok(order) = self.orders.try_recv()
        {
            self.seen.push_back(order);
        }
        self.seen.iter().any(|order| matches!(order, Order::Load(_) | Order::Gone))
    }

    /// Returns an order to the queue, after those that wait.
    pub(super) fn return_order(&mut self, order: Order) {
        self.seen.push_back(order);
    }

    /// Resolves when the file changes or goes, or the policy changes: the current work may be obsolete. The order stays for `next`. Cancel
    /// safe.
    pub(super) async fn overtaken(&mut self) {
        while self.seen.len() < ORDERS_WAITING_MAX {
            let Some(order) = self.orders.recv().await else { break };
            let overtakes = matches!(order, Order::Load(_) | Order::Judge | Order::Gone);
            self.seen.push_back(order);
            if overtakes {
                return;
            }
        }
        // The queue is closed: the work goes on to its end.
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[tokio::test]
    async fn only_another_file_or_policy_overtakes_and_no_order_is_lost() {
        let (orders, inbox) = mpsc::channel(ORDERS_WAITING_MAX);
        let mut inbox = Inbox::new(inbox);
        assert!(!inbox.has_newer() && inbox.overtaken().now_or_never().is_none());
        orders.send(Order::Again(None)).await.unwrap();
        assert!(inbox.overtaken().now_or_never().is_none());
        orders.send(Order::Judge).await.unwrap();
        assert!(inbox.overtaken().now_or_never().is_some());
        assert!(!inbox.has_newer());
        orders.send(Order::Gone).await.unwrap();
        assert!(inbox.overtaken().now_or_never().is_some());
        assert!(inbox.has_newer());
        inbox.return_order(Order::Again(None));
        drop(orders);
        assert!(inbox.overtaken().now_or_never().is_none(), "nobody is left to overtake it");
        assert!(matches!(inbox.next().await, Some(Order::Again(None))));
        assert!(matches!(inbox.next().await, Some(Order::Judge)));
        assert!(matches!(inbox.next().await, Some(Order::Gone)));
        assert!(matches!(inbox.next().await, Some(Order::Again(None))));
        assert!(inbox.next().await.is_none());
    }
}
