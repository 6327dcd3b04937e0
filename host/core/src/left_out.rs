//! The condition of the node about devices of one source that are not offered. Pure.

use nodedock_base::printable::{one_line, shorten};
use nodedock_model::{LeftOut, LeftOutDevice, Problem, ProblemCode, limit};

/// Bytes of a name and of a reason in the condition: `explain` has the whole of them.
const SHOWN_BYTES_MAX: usize = 256;

/// Says how many devices are left out, with the first as an example. `subject`: what leaves them out, such as `driver gpu.example.com`;
/// `command` lists them. `None`: there are none.
pub(crate) fn problem(left_out: &LeftOut, subject: &str, command: &str) -> Option<Problem> {
    let LeftOutDevice { name, reason } = left_out.devices().first()?;
    let [name, reason] = [name, reason].map(|text| one_line(text, SHOWN_BYTES_MAX));
    let devices = match left_out.count() {
        1 => format!("1 device is not offered, {name:?}"),
        count => format!("{count} devices are not offered, such as {name:?}"),
    };
    let message =
        format!("{subject}: {devices}: {reason}; `nodedock explain {command}` lists them");
    let message = shorten(&message, limit::PROBLEM_MESSAGE_BYTES_MAX);
    Some(Problem::unavailable(ProblemCode::DevicesLeftOut, message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_model::limit::{LEFT_OUT_REASON_BYTES_MAX, PROBLEM_MESSAGE_BYTES_MAX};

    fn message(devices: Vec<LeftOutDevice>) -> Option<String> {
        let problem = problem(
            &LeftOut::of(devices),
            "driver serial.example.com",
            "driver serial.example.com",
        );
        problem.map(|problem| problem.message)
    }

    #[test]
    fn condition_counts_and_has_an_example() {
        assert_eq!(message(Vec::new()), None);
        let console = LeftOutDevice::new("ttyS0", "it is a console");
        assert_eq!(
            message(vec![console.clone()]).as_deref(),
            Some(
                "driver serial.example.com: 1 device is not offered, \"ttyS0\": it is a console; \
                 `nodedock explain driver serial.example.com` lists them"
            )
        );
        let more = message(vec![LeftOutDevice::new("ttyS9", "no port"), console]).unwrap();
        assert!(
            more.contains("2 devices are not offered, such as \"ttyS0\": it is"),
            "{more}"
        );
        let long = "é".repeat(LEFT_OUT_REASON_BYTES_MAX / 2);
        let long = message(vec![LeftOutDevice::new(&long, &long)]).unwrap();
        assert!(long.len() <= PROBLEM_MESSAGE_BYTES_MAX, "{long}");
    }
}
