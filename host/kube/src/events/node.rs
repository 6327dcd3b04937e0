//! Events about the node: what is wrong with it, when it begins and when it is over.

use std::collections::BTreeMap;

use tokio::sync::broadcast::error::RecvError;

use super::{About, Events, Kind, Told, camel_case};
use nodedock_base::changes::Changes;
use nodedock_base::conditions::{Condition, Conditions};
use nodedock_base::printable::one_line;
use nodedock_base::tasks::Tasks;
use nodedock_model::{ChangedKind, limit};

/// By code and subject.
type Standing = BTreeMap<(String, String), String>;

/// Follows the node's conditions. `changes` is the channel on which they are told.
pub fn follow(tasks: &Tasks, events: Events, conditions: Conditions, changes: &Changes) {
    let mut told = changes.listen();
    let stop = tasks.clone();
    tasks.spawn("node-events", async move {
        let mut known = Standing::new();
        loop {
            let now = standing(conditions.list());
            difference(&known, &now).into_iter().for_each(|told| events.tell(told));
            known = now;
            loop {
                let change = tokio::select! {
                    () = stop.stopped() => return,
                    // What is told is only a reason to look.
                    change = told.recv() => change,
                };
                match change {
                    Ok(change) if change.kind == ChangedKind::Node => break,
                    Ok(_) => {}
                    Err(RecvError::Lagged(_)) => break,
                    Err(RecvError::Closed) => return,
                }
            }
        }
    });
}

/// What goes onto the Node object: others' concern is whether its drivers and its records work. The rest is in `nodedock get node`.
fn is_told(code: &str) -> bool {
    code == "driver-quarantined" || code.starts_with("checkpoint-")
}

fn standing(conditions: Vec<Condition>) -> Standing {
    let told = conditions.into_iter().filter(|condition| is_told(&condition.problem.code));
    told.map(|condition| ((condition.problem.code, condition.subject), condition.problem.message)).collect()
}

fn difference(known: &Standing, now: &Standing) -> Vec<Told> {
    let event = |kind, reason, message: &str| Told {
        about: About::Node,
        kind,
        reason,
        message: one_line(message, limit::EVENT_MESSAGE_BYTES_MAX - "…".len()),
    };
    let begun = now.iter().filter(|(key, _)| !known.contains_key(*key));
    let begun = begun.map(|((code, subject), words)| {
        // The subject is in most problems' words.
        let words =
            if words.contains(subject.as_str()) { words.clone() } else { format!("{subject}: {words}") };
        event(Kind::Warning, camel_case(code), &words)
    });
    let over = known.iter().filter(|(key, _)| !now.contains_key(*key));
    let over = over.map(|((code, subject), words)| {
        event(Kind::Normal, camel_case(code) + "Over", &format!("{subject}: no more: {words}"))
    });
    begun.chain(over).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_model::Problem;

    #[test]
    fn a_condition_is_told_when_it_begins_and_when_it_ends_and_in_between_not_at_all() {
        let conditions = Conditions::default();
        conditions.set(
            "gpu.example.com",
            Problem::unavailable("driver-quarantined", "driver gpu.example.com fails"),
        );
        conditions.set("/x", Problem::unavailable("checkpoint-disk-full", "no space"));
        conditions.set("config", Problem::invalid("config-refused", "line 3"));
        let first = standing(conditions.list());
        let told = difference(&Standing::new(), &first);
        let brief: Vec<_> = told.iter().map(|t| (t.kind, t.reason.as_str(), t.message.as_str())).collect();
        let wanted = [
            (Kind::Warning, "CheckpointDiskFull", "/x: no space"),
            (Kind::Warning, "DriverQuarantined", "driver gpu.example.com fails"),
        ];
        assert_eq!(brief, wanted);
        assert_eq!(difference(&first, &first), []);
        conditions.clear("driver-quarantined", "gpu.example.com");
        let over = difference(&first, &standing(conditions.list()));
        assert_eq!(
            (over.len(), over[0].kind, over[0].reason.as_str()),
            (1, Kind::Normal, "DriverQuarantinedOver")
        );
    }
}
