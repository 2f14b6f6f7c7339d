"""Which part of a conversation's text is trained: found for any chat template, by what the template writes.

A template is a program of somebody else's. Nothing in it says where an answer begins and ends, so it is asked: it
writes the same conversation several times, each time a little differently, and the texts are compared.

The example below is `user "Ping"`, `assistant "Pong "` (with a space after it), by a template like ChatML. A line
break is written ⏎.

1. The rendering: what the template writes (`template`, through `writer`).

       <|im_start|>user⏎Ping<|im_end|>⏎<|im_start|>assistant⏎Pong <|im_end|>⏎

2. Marks (`marks`). Every text of the conversation gets marks around it, inside the white space that templates trim. The
   template writes this conversation too. Without its marks it must be the rendering; then the marks say where the texts
   are. A text without its marks was left out.

       <|im_start|>user⏎«0 Ping 0»<|im_end|>⏎<|im_start|>assistant⏎«1 Pong 1» <|im_end|>⏎

3. Spans (`spans`): what a model writes at inference. Between two texts is the end of one turn and the head of the
   next. Two more renderings tell them apart:

       up to the question, with generation prompt    …«0 Ping 0»<|im_end|>⏎<|im_start|>assistant⏎
           What is after 0» here is the prompt. The span begins after it.
       with another question at the end              …«1 Pong 1» <|im_end|>⏎<|im_start|>user⏎«2 Go on. 2»
           What is after 1» in both renderings ends the turn. The span ends after the last tag of that.

       <|im_start|>user⏎Ping<|im_end|>⏎<|im_start|>assistant⏎[Pong <|im_end|>]⏎

   What was learned of the text between two messages is kept, since it comes again in the next conversation.
   A template with `{% generation %}` blocks says by itself where its spans are.

4. Labels (`tokens`): every token that holds a character of a span is trained.

       tokens   <|im_start|> user ⏎ Ping <|im_end|> ⏎ <|im_start|> assistant ⏎ Pong ␣ <|im_end|> ⏎
       labels                                                                   x   x      x

`limited_template` does 1 to 3 in another process, which is stopped when a template needs too much time or memory.
Read `spans` first. Not for conversations without a template (`encode`).
"""
