//! The calls by which a device plugin gives devices to a container, as a kubelet's device manager makes them.

use std::future::Future;
use std::sync::Arc;

use tokio::time::{Instant, timeout_at};

use super::plugin_paths;
use crate::driver::{Call, DeviceDriver};
use crate::hardware::Hardware;
use nodedock_base::failpoint::{self, Point};
use nodedock_model::{ContainerAllocation, DeviceNode, ExtendedResource, Problem, ProblemCode};

/// Allocates devices of a plugin. Returns the answer, and the device nodes that a runtime would find by it.
pub async fn allocate(
    resource: &ExtendedResource,
    plugin: &dyn DeviceDriver,
    call: &Call,
    ids: &[String],
    hardware: &Hardware,
) -> Result<(ContainerAllocation, Vec<DeviceNode>), Problem> {
    let until = Instant::now() + call.deadline;
    failpoint::pass(Point::AllocateCall);
    let answer = within(until, resource, "Allocate", plugin.allocate(call, ids)).await?;
    failpoint::pass(Point::AllocateAnswered);
    let (of, looked, hardware) = (resource.clone(), answer.clone(), hardware.clone());
    // A path may be on a file system that hangs: not for a thread that serves requests.
    let looking =
        tokio::task::spawn_blocking(move || plugin_paths::device_nodes(&of, &looked, &hardware));
    let looked = async {
        looking.await.unwrap_or_else(|error| {
            Err(Problem::internal(
                ProblemCode::Interrupted,
                error.to_string(),
            ))
        })
    };
    let nodes = within(until, resource, "a look at the paths of the answer", looked).await?;
    Ok((answer, nodes))
}

/// The rest of the time for a call.
pub fn remaining(request_id: &Arc<str>, until: Instant) -> Call {
    Call {
        request_id: request_id.clone(),
        deadline: until.saturating_duration_since(Instant::now()),
    }
}

/// Ends a call at its deadline, regardless of the plugin's behavior.
pub async fn within<T>(
    until: Instant,
    resource: &ExtendedResource,
    what: &str,
    call: impl Future<Output = Result<T, Problem>>,
) -> Result<T, Problem> {
    let Ok(answer) = timeout_at(until, call).await else {
        let message = format!("the device plugin of {resource} did not answer in time ({what})");
        return Err(Problem::unavailable(ProblemCode::DriverDeadline, message));
    };
    answer
}
