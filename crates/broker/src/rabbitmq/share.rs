//! How the members of a group divide its queues, with nothing between them but the queues themselves.
//!
//! Every member waits in line at every queue, and RabbitMQ serves the first in line alone; when that one goes, the next
//! has it at once. So the first member to come would have all. Therefore each signs a roll, a queue that nothing is sent
//! to, and looks how many have; who has more than its part goes to the end of some lines. Whoever comes next may have too
//! much by it and does the same, until it falls to one who has room.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use lapin::Channel;
use lapin::types::ShortString;
use tokio::sync::watch;

use super::layout;

/// Between two looks at the rolls.
const PAUSE: Duration = Duration::from_millis(500);

/// The members that listen to each topic.
pub(super) type Census = BTreeMap<Arc<str>, u32>;

/// Counts the members of each topic by its roll. Where there is none, nobody is asked to share. Ends with the channel.
pub(super) async fn count(
    channel: Channel,
    rolls: Vec<(Arc<str>, ShortString)>,
    told: watch::Sender<Census>,
) {
    loop {
        let mut census = Census::new();
        for (topic, roll) in &rolls {
            let Ok(signed) = layout::look(&channel, roll.clone()).await else { return };
            census.insert(Arc::clone(topic), signed.consumer_count());
        }
        told.send_if_modified(|known| {
            let changed = *known != census;
            *known = census;
            changed
        });
        tokio::time::sleep(PAUSE).await;
    }
}

/// How many queues of a topic one of so many members may have.
pub(super) fn part(partitions: u16, members: u32) -> usize {
    u32::from(partitions).div_ceil(members.max(1)) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_all_members_are_enough_for_all_queues() {
        for partitions in 1..=20 {
            for members in 0..=25 {
                assert!(part(partitions, members) * members.max(1) as usize >= usize::from(partitions));
            }
        }
        assert_eq!([part(8, 1), part(8, 2), part(8, 3), part(8, 9)], [8, 4, 3, 1]);
    }
}
