//! Work inside the store: the work of a message and its mark are one transaction.
//!
//! A statement that cannot be used stops the group, and no message pays for it. But it may be the values of one message that
//! lead there: a name that a function puts together, a cast that hangs on a value, a statement that takes too long. So what
//! the store could not do is weighed as the answer of a handler is: see [`suspect`](crate::suspect).

use message::MessageId;
use store::{Arrival, Error, Handled, Receipt, Reservation, Work};
use tracing::warn;

use crate::cost::Step;
use crate::group::Group;
use crate::handler::Ran;

/// One receipt for each arrival, in order.
pub(crate) async fn handle(
    group: &Group,
    arrivals: Vec<Arrival>,
    work: &Work,
) -> Result<Vec<Receipt>, Error> {
    let ids: Vec<MessageId> = arrivals.iter().map(|arrival| arrival.message.id).collect();
    // Nobody is to blame at once: of a message that was never met like this, the id is enough.
    let known = group.suspects().knows_any(&ids).then(|| arrivals.clone());
    let mut receipts = process(group, arrivals, work).await?;
    let mut open: Vec<usize> = (0..ids.len()).collect();
    loop {
        for place in open.iter().filter(|place| receipts[**place] == Receipt::Done) {
            weigh(group, ids[*place], Handled::Done, true);
        }
        // Behind the first of these, those that say the same were not tried.
        open.retain(|place| matches!(receipts[*place], Receipt::Unavailable { .. }));
        let Some((first, rest)) = open.split_first() else { return Ok(receipts) };
        let Receipt::Unavailable { error } = receipts[*first].clone() else { return Ok(receipts) };
        // What cannot be used at all is nobody's doing, however often others were handled before.
        let usable = group.store().check(work).await.is_ok();
        let handled = weigh(group, ids[*first], Handled::Unavailable { error }, usable);
        let (Handled::Retry { .. }, Some(arrivals)) = (&handled, &known) else { return Ok(receipts) };
        receipts[*first] = blame(group, &arrivals[*first], handled).await?;
        // Nothing may pass one that another worker has.
        if receipts[*first] == Receipt::Busy || rest.is_empty() {
            return Ok(receipts);
        }
        let again = rest.iter().map(|place| arrivals[*place].clone()).collect();
        for (place, receipt) in rest.iter().zip(process(group, again, work).await?) {
            receipts[*place] = receipt;
        }
        open = rest.to_vec();
    }
}

async fn process(group: &Group, arrivals: Vec<Arrival>, work: &Work) -> Result<Vec<Receipt>, Error> {
    let asked = arrivals.len();
    let call = group.store().process(group.name(), arrivals, work, group.rules());
    let receipts = group.cost().of(Step::Process, call).await?;
    match receipts.len() {
        got if got == asked => Ok(receipts),
        got => Err(Error::Broken(format!("{got} receipts came for {asked} arrivals"))),
    }
}

fn weigh(group: &Group, id: MessageId, handled: Handled, reached: bool) -> Handled {
    group.suspects().weigh(id, Ran { handled, reached }, group.rules().retry.give_up_after)
}

/// A message has failed, though the store did not say so.
async fn blame(group: &Group, arrival: &Arrival, handled: Handled) -> Result<Receipt, Error> {
    warn!(message_id = %arrival.message.id, group = group.name(), ?handled, "this message is to blame");
    let one = vec![arrival.clone()];
    let reserved = group.store().reserve(group.name(), one, group.reservation(), group.rules()).await?;
    let token = match reserved.into_iter().next() {
        Some(Reservation::Granted(token)) => token,
        Some(Reservation::Settled(receipt)) => return Ok(receipt),
        None => return Err(Error::Broken("a reservation is missing in the store's answer".to_owned())),
    };
    let conclusion = vec![(arrival.clone(), token, handled)];
    let receipts = group.store().conclude(group.name(), conclusion, group.rules()).await?;
    receipts
        .into_iter()
        .next()
        .ok_or_else(|| Error::Broken("a receipt is missing in the store's answer".to_owned()))
}
