//! Asks a device plugin which devices it prefers. That is a hint: no failure of it refuses a pod.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::{Devices, Question};
use crate::driver::plugin_calls::{self, within};
use nodedock_base::printable::one_line;
use nodedock_model::{ExtendedResource, Problem, ProblemCode};

/// Deadline of a call: plugins answer from memory.
const PREFERENCE_WALL: Duration = Duration::from_secs(5);
/// Time without calls after one failed: no more than one pod in it waits.
const PREFERENCE_PAUSE: Duration = Duration::from_secs(60);
/// Bytes of a fault, which has an ID that the plugin made up.
const FAULT_SHOWN_MAX: usize = 200;

impl Devices {
    /// Returns the devices that the plugin of a resource prefers, as it names them. Empty if it names none, as after a call that failed, which
    /// is a condition of the node.
    pub async fn preferred(
        &self,
        resource: &ExtendedResource,
        request_id: &Arc<str>,
        question: &Question,
        deadline: Instant,
    ) -> Vec<String> {
        let found = self
            .state
            .lock()
            .resources
            .source(resource)
            .and_then(|offer| {
                let is_unasked = offer
                    .unasked_until
                    .is_some_and(|until| Instant::now() < until);
                offer
                    .plugin
                    .clone()
                    .filter(|_| offer.is_active() && !is_unasked)
            });
        let Some((generation, driver)) = found else {
            return Vec::new();
        };
        if !driver.options().preferred_allocation_available {
            return Vec::new();
        }
        let deadline = deadline.min(Instant::now() + PREFERENCE_WALL);
        let Question {
            available,
            must_include,
            size,
        } = question;
        let size = u32::try_from(*size).unwrap_or(u32::MAX);
        let call = plugin_calls::remaining(request_id, deadline);
        let answer = driver.preferred_allocation(&call, available, must_include, size);
        let (preferred, why) =
            match within(deadline, resource, "preferred allocation", answer).await {
                Ok(preferred) => {
                    let fault = question.fault(&preferred);
                    let shown = fault.map(|fault| one_line(&fault, FAULT_SHOWN_MAX));
                    (
                        preferred,
                        shown.map(|fault| format!("answered wrongly: {fault}")),
                    )
                }
                Err(failed) => {
                    let until = Instant::now() + PREFERENCE_PAUSE;
                    self.state
                        .lock()
                        .resources
                        .leave_unasked(resource, generation, until);
                    (Vec::new(), Some(format!("failed: {failed}")))
                }
            };
        self.report_preference(resource, request_id, why);
        preferred
    }

    fn report_preference(
        &self,
        resource: &ExtendedResource,
        request_id: &str,
        why: Option<String>,
    ) {
        // The plugin of an adapter is not asked any more.
        let Some(why) = why.filter(|_| self.adapting(resource).is_none()) else {
            return self
                .conditions
                .clear(ProblemCode::PreferenceFailed, resource.as_str());
        };
        let message = format!(
            "GetPreferredAllocation of the plugin of {resource} {why}; devices that it does not name are chosen without it"
        );
        let problem = Problem::unavailable(ProblemCode::PreferenceFailed, message);
        tracing::warn!(%resource, request = request_id, code = problem.code, %problem, "devices chosen without the plugin's preference");
        self.conditions.set(resource.as_str(), problem);
    }
}
